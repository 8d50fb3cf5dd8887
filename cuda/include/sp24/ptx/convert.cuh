// Conversions between FP8, f16, bf16 and f32: PTX ISA, "cvt".
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

// Two E4M3 codes, in the low or (kHalf 1) the high half of a word, as two f16, exactly.
template <int kHalf>
__device__ __forceinline__ uint32_t f16x2_of_e4m3x2(uint32_t codes) {
  uint32_t pair;
  if constexpr (kHalf == 0)
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(pair) : "r"(codes));
  else
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(pair) : "r"(codes));
  return pair;
}

// Two f16 as f32, exactly.
__device__ __forceinline__ float2 f32_of_f16x2(uint32_t pair) {
  float2 v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v.x) : "h"(static_cast<uint16_t>(pair)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(v.y) : "h"(static_cast<uint16_t>(pair >> 16)));
  return v;
}

// To nearest even, `low` in the low half; infinite beyond the type.
__device__ __forceinline__ uint32_t f16x2_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ uint32_t bf16x2_of(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Two values with magnitudes of at most the two of `limit`, which are positive; NaN stays NaN (PTX ISA,
// "min": .xorsign.abs).
__device__ __forceinline__ uint32_t limited_f16x2(uint32_t pair, uint32_t limit) {
  asm("min.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(limit));
  return pair;
}
__device__ __forceinline__ uint32_t limited_bf16x2(uint32_t pair, uint32_t limit) {
  asm("min.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(limit));
  return pair;
}

// Products of two and two, rounded once, to nearest even; subnormals kept.
__device__ __forceinline__ uint32_t multiplied_f16x2(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
__device__ __forceinline__ uint32_t multiplied_bf16x2(uint32_t a, uint32_t b) {
  uint32_t pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}

}  // namespace sp24::ptx
