// Bulk copies and tensor copies into shared memory: PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor".
// Each counts its bytes on an mbarrier.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace sp24::ptx {

// How L2 should treat what a copy reads (PTX ISA, "createpolicy"): as any line, or as one that will
// not be read again.
__device__ __forceinline__ uint64_t l2_policy(bool read_once) {
  uint64_t normal, first;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  return read_once ? first : normal;
}

// `bytes` contiguous bytes of global memory; both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t dst, const void* src, uint32_t bytes,
                                          uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

// The box of `map` at (x, y), x the contiguous coordinate.
__device__ __forceinline__ void tensor_copy(uint32_t dst, const CUtensorMap* map, int x, int y,
                                            uint32_t bar, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar), "l"(policy)
      : "memory");
}

// The same box into every CTA of `cta_mask`, at the same offset, counted on each CTA's own barrier.
__device__ __forceinline__ void tensor_copy_multicast(uint32_t dst, const CUtensorMap* map, int x,
                                                      int y, uint32_t bar, uint16_t cta_mask,
                                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(dst),
      "l"(map), "r"(x), "r"(y), "r"(bar), "h"(cta_mask), "l"(policy)
      : "memory");
}

// Four bytes into shared memory, by the thread's own account: see `copy_async_wait_all`.
__device__ __forceinline__ void copy_async(uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(dst), "l"(src) : "memory");
}
// Waits until all of this thread's `copy_async` have been written.
__device__ __forceinline__ void copy_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// Orders this thread's ordinary accesses of shared memory before asynchronous ones (copies, wgmmas)
// that other threads start after a barrier.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Brings the box into L2.
__device__ __forceinline__ void tensor_prefetch(const CUtensorMap* map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x),
               "r"(y)
               : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace sp24::ptx
