/* The result of a call of a group of ranks (group.c). */

#ifndef FERRUM_GROUP_H
#define FERRUM_GROUP_H

enum group_status { GROUP_DONE, GROUP_ABORTED, GROUP_UNEQUAL };

#endif
