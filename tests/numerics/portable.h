/* Leaves the sources of the library their portable code alone, included before each: for portable.c, which runs no other, and
 * for wheels that are not run. The system's headers must still know the CPU, so they come first. */

#include <float.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#undef __x86_64__
