// SPDX-License-Identifier: Apache-2.0
// Exchange between processes by NCCL: the table's group of collectives.
#pragma once

#include "halfstep/runtime/plugin.h"

namespace hscuda::collectives {

// As halfstep_plugin_table has them. NCCL is opened by the first of these calls; without it they fail and say what was
// tried.
halfstep_status group_id(void* id, uint64_t capacity, uint64_t* bytes);
halfstep_status group_create(int32_t device, int32_t ranks, int32_t rank, const void* id, uint64_t bytes,
                             halfstep_group** group);
halfstep_status group_destroy(halfstep_group* group);
halfstep_status group_abort(halfstep_group* group);
halfstep_status all_reduce(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype, int32_t reduce);
halfstep_status broadcast(halfstep_group* group, halfstep_queue* queue, void* data, int64_t count, int32_t dtype,
                          int32_t root);
halfstep_status all_gather(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype);
halfstep_status reduce_scatter(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                               int32_t dtype, int32_t reduce);
halfstep_status all_to_all(halfstep_group* group, halfstep_queue* queue, const void* in, void* out, int64_t count,
                           int32_t dtype);
halfstep_status send_receive(halfstep_group* group, halfstep_queue* queue, const halfstep_transfer* transfers,
                             int32_t count);
halfstep_status group_error(halfstep_group* group);

}  // namespace hscuda::collectives
