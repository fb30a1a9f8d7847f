/* Preloaded: fails what the library of kernels allocates, once `allowed` allocations have succeeded, and counts what it
 * holds. Everything else in the process is served. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>

extern void *__libc_calloc(size_t, size_t), *__libc_memalign(size_t, size_t), __libc_free(void *);
int watching, allowed, held;
static void *ours[1000];

/* Or what called the library: a function that ends with an allocation jumps there. */
static int kernels(void *caller)
{
    Dl_info info;
    return watching && dladdr(caller, &info) &&
           (strstr(info.dli_fname, "/kernels.so") || strstr(info.dli_fname, "/libffi") || strstr(info.dli_fname, "/_ctypes"));
}

static void *counted(void *made)
{
    if (made)
        ours[held++] = made;
    return made;
}

void *calloc(size_t count, size_t size)
{
    if (!kernels(__builtin_return_address(0)))
        return __libc_calloc(count, size);
    return allowed-- > 0 ? counted(__libc_calloc(count, size)) : NULL;
}

int posix_memalign(void **to, size_t alignment, size_t size)
{
    void *made;
    if (!kernels(__builtin_return_address(0)))
        made = __libc_memalign(alignment, size);
    else
        made = allowed-- > 0 ? counted(__libc_memalign(alignment, size)) : NULL;
    return made ? (*to = made, 0) : ENOMEM;
}

void free(void *before)
{
    for (int i = 0; i < held; i++)
        if (ours[i] == before)
            ours[i] = ours[--held];
    __libc_free(before);
}
