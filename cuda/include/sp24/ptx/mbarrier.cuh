// mbarrier: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
// Thin wrappers; what each ordering is enough for is said where it is used (body.cuh).
#pragma once
#include <cstdint>

namespace sp24::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the cluster's other CTAs and to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}

// Arrives at this CTA's barrier; releases what the thread did before, at CTA scope.
__device__ __forceinline__ void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Arrives once all cp.async copies that this thread has started have been made; one of the arrivals
// that the barrier was initialised for.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Arrives at a barrier of any CTA of the cluster. Relaxed: it publishes nothing.
__device__ __forceinline__ void mbarrier_arrive_relaxed_cluster(uint32_t cluster_bar) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_bar)
               : "memory");
}

// The same, releasing at cluster scope: a MEMBAR, so not for a loop.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t cluster_bar) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_bar)
               : "memory");
}

// Waits until the phase of this parity has completed; acquires at CTA scope.
__device__ __forceinline__ void mbarrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// The same, acquiring at cluster scope: what other CTAs released or sent is seen.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// Stores four words in a CTA of the cluster and counts their 16 bytes on a barrier there (PTX ISA,
// "st.async"). The count releases them at cluster scope.
template <class Word>
__device__ __forceinline__ void store_async(uint32_t cluster_addr, const Word (&v)[4],
                                            uint32_t cluster_bar) {
  static_assert(sizeof(Word) == 4, "as the instruction has it");
  const auto bits = [&](int i) { return reinterpret_cast<const uint32_t&>(v[i]); };
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(cluster_addr),
      "r"(bits(0)), "r"(bits(1)), "r"(bits(2)), "r"(bits(3)), "r"(cluster_bar)
      : "memory");
}

}  // namespace sp24::ptx
