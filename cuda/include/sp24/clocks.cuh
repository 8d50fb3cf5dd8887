// What the SMs' own counters say, so that the clock between two such marks can be had. (What NVML reads is
// up to a third above it where the power cap holds the card back.)
#pragma once
#include <cstdint>

#include "sp24/convert.cuh"

namespace sp24 {

#define SP24_CLOCKS_ARGS(X)                                                                 \
  X(uint64_t, marks) /* u64 [sms][2]: cycles of that SM, nanoseconds of the global timer */ \
  X(int32_t, sms)

struct ClocksArgs {
#define X(type, name) type name;
  SP24_CLOCKS_ARGS(X)
#undef X
};

// Grid: a CTA an SM. An SM that finds two keeps what either read; one that finds none keeps its zeros.
__device__ __forceinline__ void mark_clocks(const ClocksArgs& args) {
  if (threadIdx.x > 0) return;
  uint32_t sm;
  ulonglong2 mark;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(mark.x));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(mark.y));
  if (sm < static_cast<uint32_t>(args.sms)) reinterpret_cast<ulonglong2*>(args.marks)[sm] = mark;
}

}  // namespace sp24
