// Conversions between f32 and FP8: PTX ISA, "cvt".
#pragma once
#include <cstdint>

namespace sp24::ptx {

// To nearest even; what is beyond 448 becomes 448. The lower byte of the pair.
__device__ __forceinline__ uint32_t e4m3_of(float value) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return pair & 0xFFu;
}

// The same of E5M2; what is beyond 57344 becomes 57344.
__device__ __forceinline__ uint32_t e5m2_of(float value) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return pair & 0xFFu;
}

// The bits of the f16 that is the E4M3 value `code`, exactly.
__device__ __forceinline__ uint32_t f16_of_e4m3(uint32_t code) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(code)));
  return pair & 0xFFFFu;
}

}  // namespace sp24::ptx
