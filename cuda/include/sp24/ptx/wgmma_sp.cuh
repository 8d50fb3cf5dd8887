// wgmma.mma_async.sp: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", sparse form.
// B by shared-memory descriptor, A by one too or in registers.
#pragma once
#include <cstdint>

namespace sp24::ptx {

// Orders the accumulators' registers before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Matrix descriptor of a K-major operand without swizzle, of 8 x 16 bytes side by side: `Leading` is the
// distance between these along K, `Stride` along the rows.
template <int Leading, int Stride>
__device__ __forceinline__ uint64_t descriptor_of_cores(uint32_t shared_addr) {
  constexpr uint64_t fixed = (uint64_t{Stride >> 4} << 32) | (uint64_t{Leading >> 4} << 16);
  return fixed | ((shared_addr & 0x3ffff) >> 4);
}

// Matrix descriptor of a K-major operand in the canonical swizzled layout (PTX ISA, "Matrix
// descriptor"): layout 1 is the 128-byte swizzle, 2 the 64-byte one; `stride` is the distance in
// bytes between groups of eight rows. The leading offset is not used by these layouts.
template <int Layout, int Stride>
__device__ __forceinline__ uint64_t descriptor(uint32_t shared_addr) {
  constexpr uint64_t fixed = (uint64_t{Layout} << 62) | (uint64_t{Stride >> 4} << 32) | (uint64_t{1} << 16);
  return fixed | ((shared_addr & 0x3ffff) >> 4);
}

// Operand strings of the instruction for 4 to 128 accumulator registers, and their constraints: `C`
// is "+f" for f32, "+r" for s32 and for pairs of f16.
// clang-format off
#define SP24_REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SP24_REGS_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define SP24_REGS_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define SP24_REGS_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define SP24_REGS_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SP24_REGS_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define SP24_REGS_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define SP24_REGS_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define SP24_REGS_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define SP24_REGS_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define SP24_REGS_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define SP24_REGS_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define SP24_REGS_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define SP24_REGS_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define SP24_REGS_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define SP24_REGS_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define SP24_ACC4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define SP24_ACC8(C, i) SP24_ACC4(C, i), SP24_ACC4(C, i + 4)
#define SP24_R4_REGS "%0, %1, %2, %3"
#define SP24_R4_ACC(C) SP24_ACC4(C, 0)
#define SP24_R8_REGS SP24_REGS_0
#define SP24_R8_ACC(C) SP24_ACC8(C, 0)
#define SP24_R16_REGS SP24_REGS_0 ", " SP24_REGS_1
#define SP24_R16_ACC(C) SP24_ACC8(C, 0), SP24_ACC8(C, 8)
#define SP24_R32_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3
#define SP24_R32_ACC(C) SP24_ACC8(C, 0), SP24_ACC8(C, 8), SP24_ACC8(C, 16), SP24_ACC8(C, 24)
#define SP24_R40_REGS SP24_R32_REGS ", " SP24_REGS_4
#define SP24_R40_ACC(C) SP24_R32_ACC(C), SP24_ACC8(C, 32)
#define SP24_R48_REGS SP24_R32_REGS ", " SP24_REGS_4 ", " SP24_REGS_5
#define SP24_R48_ACC(C) SP24_R32_ACC(C), SP24_ACC8(C, 32), SP24_ACC8(C, 40)
#define SP24_R64_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3 ", " SP24_REGS_4 ", " SP24_REGS_5 ", " SP24_REGS_6 ", " SP24_REGS_7
#define SP24_R64_ACC(C) SP24_ACC8(C, 0), SP24_ACC8(C, 8), SP24_ACC8(C, 16), SP24_ACC8(C, 24), SP24_ACC8(C, 32), SP24_ACC8(C, 40), SP24_ACC8(C, 48), SP24_ACC8(C, 56)
#define SP24_R80_REGS SP24_R64_REGS ", " SP24_REGS_8 ", " SP24_REGS_9
#define SP24_R80_ACC(C) SP24_R64_ACC(C), SP24_ACC8(C, 64), SP24_ACC8(C, 72)
#define SP24_R96_REGS SP24_R64_REGS ", " SP24_REGS_8 ", " SP24_REGS_9 ", " SP24_REGS_10 ", " SP24_REGS_11
#define SP24_R96_ACC(C) SP24_R64_ACC(C), SP24_ACC8(C, 64), SP24_ACC8(C, 72), SP24_ACC8(C, 80), SP24_ACC8(C, 88)
#define SP24_R128_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3 ", " SP24_REGS_4 ", " SP24_REGS_5 ", " SP24_REGS_6 ", " SP24_REGS_7 ", " SP24_REGS_8 ", " SP24_REGS_9 ", " SP24_REGS_10 ", " SP24_REGS_11 ", " SP24_REGS_12 ", " SP24_REGS_13 ", " SP24_REGS_14 ", " SP24_REGS_15
#define SP24_R128_ACC(C) SP24_ACC8(C, 0), SP24_ACC8(C, 8), SP24_ACC8(C, 16), SP24_ACC8(C, 24), SP24_ACC8(C, 32), SP24_ACC8(C, 40), SP24_ACC8(C, 48), SP24_ACC8(C, 56), SP24_ACC8(C, 64), SP24_ACC8(C, 72), SP24_ACC8(C, 80), SP24_ACC8(C, 88), SP24_ACC8(C, 96), SP24_ACC8(C, 104), SP24_ACC8(C, 112), SP24_ACC8(C, 120)
// clang-format on

// d[64 x N] (+)= a[64 x K] * b[N x K]^T, K one step of the type, in the accumulators that the type
// has. `accumulate` 0 overwrites d. `Sel` is the sparsity selector, which must be an immediate.
template <class Operand, int N>
struct WgmmaSp;

// R registers of type REG hold an N of the accumulators; the operands after them have the numbers A
// to SEL. TAIL is what follows the predicate: the signs of A and B and the transposes, as far as a
// type has them.
#define SP24_DEFINE_WGMMA_SP(OPERAND, N, TYPES, TAIL, REG, C, R, A, B, META, ACC, SEL)             \
  template <>                                                                                      \
  struct WgmmaSp<OPERAND, N> {                                                                     \
    template <int Sel>                                                                             \
    static __device__ __forceinline__ void issue(REG (&d)[R], uint64_t a, uint64_t b,              \
                                                 uint32_t meta, uint32_t accumulate) {             \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred p;\n"                                                                        \
          "setp.ne.b32 p, %" #ACC ", 0;\n"                                                         \
          "wgmma.mma_async.sp.sync.aligned.m64n" #N TYPES " {" SP24_R##R##_REGS "}, %" #A ", %" #B \
          ", %" #META ", %" #SEL ", p" TAIL ";\n"                                                  \
          "}\n"                                                                                    \
          : SP24_R##R##_ACC(C)                                                                     \
          : "l"(a), "l"(b), "r"(meta), "r"(accumulate), "n"(Sel));                                 \
    }                                                                                              \
  };

// The tile widths that kernels have, with an accumulator a register.
#define SP24_DEFINE_WGMMA_SP_ALL_N(OPERAND, TYPES, TAIL, REG, C)                     \
  SP24_DEFINE_WGMMA_SP(OPERAND, 8, TYPES, TAIL, REG, C, 4, 4, 5, 6, 7, 8)            \
  SP24_DEFINE_WGMMA_SP(OPERAND, 16, TYPES, TAIL, REG, C, 8, 8, 9, 10, 11, 12)        \
  SP24_DEFINE_WGMMA_SP(OPERAND, 32, TYPES, TAIL, REG, C, 16, 16, 17, 18, 19, 20)     \
  SP24_DEFINE_WGMMA_SP(OPERAND, 64, TYPES, TAIL, REG, C, 32, 32, 33, 34, 35, 36)     \
  SP24_DEFINE_WGMMA_SP(OPERAND, 96, TYPES, TAIL, REG, C, 48, 48, 49, 50, 51, 52)     \
  SP24_DEFINE_WGMMA_SP(OPERAND, 128, TYPES, TAIL, REG, C, 64, 64, 65, 66, 67, 68)    \
  SP24_DEFINE_WGMMA_SP(OPERAND, 160, TYPES, TAIL, REG, C, 80, 80, 81, 82, 83, 84)    \
  SP24_DEFINE_WGMMA_SP(OPERAND, 192, TYPES, TAIL, REG, C, 96, 96, 97, 98, 99, 100)   \
  SP24_DEFINE_WGMMA_SP(OPERAND, 256, TYPES, TAIL, REG, C, 128, 128, 129, 130, 131, 132)

// The same with two accumulators a register.
#define SP24_DEFINE_WGMMA_SP_ALL_N_PAIRS(OPERAND, TYPES, TAIL)                              \
  SP24_DEFINE_WGMMA_SP(OPERAND, 16, TYPES, TAIL, uint32_t, "+r", 4, 4, 5, 6, 7, 8)          \
  SP24_DEFINE_WGMMA_SP(OPERAND, 32, TYPES, TAIL, uint32_t, "+r", 8, 8, 9, 10, 11, 12)       \
  SP24_DEFINE_WGMMA_SP(OPERAND, 64, TYPES, TAIL, uint32_t, "+r", 16, 16, 17, 18, 19, 20)    \
  SP24_DEFINE_WGMMA_SP(OPERAND, 128, TYPES, TAIL, uint32_t, "+r", 32, 32, 33, 34, 35, 36)   \
  SP24_DEFINE_WGMMA_SP(OPERAND, 256, TYPES, TAIL, uint32_t, "+r", 64, 64, 65, 66, 67, 68)

// d[64 x N] = a[64 x 8] * b[N x 8]^T of tf32, both dense, A in registers.
template <int N>
struct WgmmaTf32;

#define SP24_DEFINE_WGMMA_TF32(N, R, A0, A1, A2, A3, B)                                              \
  template <>                                                                                       \
  struct WgmmaTf32<N> {                                                                             \
    static __device__ __forceinline__ void issue(float (&d)[R], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %" #B ", %" #B ";\n"                           \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" SP24_R##R##_REGS     \
                   "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1;\n}\n"            \
                   : SP24_R##R##_ACC("+f")                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                           \
    }                                                                                               \
  };
SP24_DEFINE_WGMMA_TF32(8, 4, 4, 5, 6, 7, 8)
SP24_DEFINE_WGMMA_TF32(32, 16, 16, 17, 18, 19, 20)
SP24_DEFINE_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36)
SP24_DEFINE_WGMMA_TF32(80, 40, 40, 41, 42, 43, 44)

// WgmmaSp with A in registers. The operands after R accumulators: A's four, then B, metadata,
// `accumulate` and the selector.
template <class Operand, int N>
struct WgmmaSpRegisters;

#define SP24_DEFINE_WGMMA_SP_REGISTERS_(OPERAND, N, TYPES, TAIL, R, A0, A1, A2, A3, B, META, ACC, SEL) \
  template <>                                                                                      \
  struct WgmmaSpRegisters<OPERAND, N> {                                                            \
    template <int Sel>                                                                             \
    static __device__ __forceinline__ void issue(float (&d)[R], const uint32_t (&a)[4],            \
                                                 uint64_t b, uint32_t meta, uint32_t accumulate) { \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred p;\n"                                                                        \
          "setp.ne.b32 p, %" #ACC ", 0;\n"                                                         \
          "wgmma.mma_async.sp.sync.aligned.m64n" #N TYPES " {" SP24_R##R##_REGS "},"               \
          " {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", %" #META ", %" #SEL ", p" TAIL ";\n" \
          "}\n"                                                                                    \
          : SP24_R##R##_ACC("+f")                                                                  \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta), "r"(accumulate),        \
            "n"(Sel));                                                                             \
    }                                                                                              \
  };
#define SP24_DEFINE_WGMMA_SP_REGISTERS_8(OPERAND, TYPES, TAIL) \
  SP24_DEFINE_WGMMA_SP_REGISTERS_(OPERAND, 8, TYPES, TAIL, 4, 4, 5, 6, 7, 8, 9, 10, 11)
#define SP24_DEFINE_WGMMA_SP_REGISTERS_16(OPERAND, TYPES, TAIL) \
  SP24_DEFINE_WGMMA_SP_REGISTERS_(OPERAND, 16, TYPES, TAIL, 8, 8, 9, 10, 11, 12, 13, 14, 15)
#define SP24_DEFINE_WGMMA_SP_REGISTERS_64(OPERAND, TYPES, TAIL) \
  SP24_DEFINE_WGMMA_SP_REGISTERS_(OPERAND, 64, TYPES, TAIL, 32, 32, 33, 34, 35, 36, 37, 38, 39)
#define SP24_DEFINE_WGMMA_SP_REGISTERS_256(OPERAND, TYPES, TAIL)                                   \
  SP24_DEFINE_WGMMA_SP_REGISTERS_(OPERAND, 256, TYPES, TAIL, 128, 128, 129, 130, 131, 132, 133, 134, \
                                  135)
#define SP24_DEFINE_WGMMA_SP_REGISTERS(OPERAND, N, TYPES, TAIL) \
  SP24_DEFINE_WGMMA_SP_REGISTERS_##N(OPERAND, TYPES, TAIL)

}  // namespace sp24::ptx
