/* Ranks of one machine (group.c). */

#ifndef FERRUM_GROUP_H
#define FERRUM_GROUP_H

#include <stdint.h>

struct ferrum_group;

enum group_status { GROUP_DONE, GROUP_ABORTED, GROUP_UNEQUAL };

/* Make rows the sum of all ranks' rows: float32 where `wide`, else bfloat16. An enum group_status. */
int32_t ferrum_group_reduce(struct ferrum_group *self, void *rows, int64_t elements, int32_t wide);

#endif
