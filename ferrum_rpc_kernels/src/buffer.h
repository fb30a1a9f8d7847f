/* Buffers that grow and are kept, so that a steady step allocates nothing. */

#ifndef FERRUM_BUFFER_H
#define FERRUM_BUFFER_H

#include <stddef.h>
#include <stdlib.h>

/* Grow `buffer` (the address of a pointer, of `size` bytes so far) to `wanted` bytes; its contents are lost. 0 if memory is
 * short, with the buffer unchanged. */
static inline int reserve_buffer(void *buffer, size_t *size, size_t wanted)
{
    void **held = buffer, *larger = NULL;
    if (wanted <= *size)
        return 1;
    wanted = wanted > 2 * *size ? wanted : 2 * *size;
    if (posix_memalign(&larger, 64, wanted))
        return 0;
    free(*held);
    *held = larger;
    *size = wanted;
    return 1;
}

#endif
