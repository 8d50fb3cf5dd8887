// wgmma.mma_async.sp: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", sparse form.
// Both operands by shared-memory descriptor, f32 accumulation.
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

// Matrix descriptor of a K-major operand in the canonical swizzled layout (PTX ISA, "Matrix
// descriptor"): layout 1 is the 128-byte swizzle, 2 the 64-byte one; `stride` is the distance in
// bytes between groups of eight rows. The leading offset is not used by these layouts.
template <int Layout, int Stride>
__device__ __forceinline__ uint64_t descriptor(uint32_t shared_addr) {
  constexpr uint64_t fixed = (uint64_t{Layout} << 62) | (uint64_t{Stride >> 4} << 32) | (uint64_t{1} << 16);
  return fixed | ((shared_addr & 0x3ffff) >> 4);
}

// Operand strings of the instruction, eight accumulator registers a macro.
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
#define SP24_ACC8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                     "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SP24_N8_REGS "%0, %1, %2, %3"
#define SP24_N8_ACC "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define SP24_N16_REGS SP24_REGS_0
#define SP24_N16_ACC SP24_ACC8(0)
#define SP24_N32_REGS SP24_REGS_0 ", " SP24_REGS_1
#define SP24_N32_ACC SP24_ACC8(0), SP24_ACC8(8)
#define SP24_N64_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3
#define SP24_N64_ACC SP24_ACC8(0), SP24_ACC8(8), SP24_ACC8(16), SP24_ACC8(24)
#define SP24_N96_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3 ", " SP24_REGS_4 ", " SP24_REGS_5
#define SP24_N96_ACC SP24_ACC8(0), SP24_ACC8(8), SP24_ACC8(16), SP24_ACC8(24), SP24_ACC8(32), SP24_ACC8(40)
#define SP24_N128_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3 ", " SP24_REGS_4 ", " SP24_REGS_5 ", " SP24_REGS_6 ", " SP24_REGS_7
#define SP24_N128_ACC SP24_ACC8(0), SP24_ACC8(8), SP24_ACC8(16), SP24_ACC8(24), SP24_ACC8(32), SP24_ACC8(40), SP24_ACC8(48), SP24_ACC8(56)
#define SP24_N192_REGS SP24_N96_REGS ", " SP24_REGS_6 ", " SP24_REGS_7 ", " SP24_REGS_8 ", " SP24_REGS_9 ", " SP24_REGS_10 ", " SP24_REGS_11
#define SP24_N192_ACC SP24_N96_ACC, SP24_ACC8(48), SP24_ACC8(56), SP24_ACC8(64), SP24_ACC8(72), SP24_ACC8(80), SP24_ACC8(88)
#define SP24_N256_REGS SP24_REGS_0 ", " SP24_REGS_1 ", " SP24_REGS_2 ", " SP24_REGS_3 ", " SP24_REGS_4 ", " SP24_REGS_5 ", " SP24_REGS_6 ", " SP24_REGS_7 ", " SP24_REGS_8 ", " SP24_REGS_9 ", " SP24_REGS_10 ", " SP24_REGS_11 ", " SP24_REGS_12 ", " SP24_REGS_13 ", " SP24_REGS_14 ", " SP24_REGS_15
#define SP24_N256_ACC SP24_ACC8(0), SP24_ACC8(8), SP24_ACC8(16), SP24_ACC8(24), SP24_ACC8(32), SP24_ACC8(40), SP24_ACC8(48), SP24_ACC8(56), SP24_ACC8(64), SP24_ACC8(72), SP24_ACC8(80), SP24_ACC8(88), SP24_ACC8(96), SP24_ACC8(104), SP24_ACC8(112), SP24_ACC8(120)
// clang-format on

// d[64 x N] (+)= a[64 x K] * b[N x K]^T, K one step of the type. `accumulate` 0 overwrites d.
// `Sel` is the sparsity selector, which must be an immediate.
template <class Operand, int N>
struct WgmmaSp;

#define SP24_DEFINE_WGMMA_SP(OPERAND, N, TYPES, TAIL, A, B, META, ACC, SEL)                        \
  template <>                                                                                      \
  struct WgmmaSp<OPERAND, N> {                                                                     \
    template <int Sel>                                                                             \
    static __device__ __forceinline__ void issue(float (&d)[N / 2], uint64_t a, uint64_t b,        \
                                                 uint32_t meta, uint32_t accumulate) {             \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred p;\n"                                                                        \
          "setp.ne.b32 p, %" #ACC ", 0;\n"                                                         \
          "wgmma.mma_async.sp.sync.aligned.m64n" #N TYPES " {" SP24_N##N##_REGS "}, %" #A ", %" #B \
          ", %" #META ", %" #SEL ", p, 1, 1" TAIL ";\n"                                            \
          "}\n"                                                                                    \
          : SP24_N##N##_ACC                                                                        \
          : "l"(a), "l"(b), "r"(meta), "r"(accumulate), "n"(Sel));                                 \
    }                                                                                              \
  };

#define SP24_DEFINE_WGMMA_SP_ALL_N(OPERAND, TYPES, TAIL)                      \
  SP24_DEFINE_WGMMA_SP(OPERAND, 8, TYPES, TAIL, 4, 5, 6, 7, 8)                \
  SP24_DEFINE_WGMMA_SP(OPERAND, 16, TYPES, TAIL, 8, 9, 10, 11, 12)            \
  SP24_DEFINE_WGMMA_SP(OPERAND, 32, TYPES, TAIL, 16, 17, 18, 19, 20)          \
  SP24_DEFINE_WGMMA_SP(OPERAND, 64, TYPES, TAIL, 32, 33, 34, 35, 36)          \
  SP24_DEFINE_WGMMA_SP(OPERAND, 96, TYPES, TAIL, 48, 49, 50, 51, 52)          \
  SP24_DEFINE_WGMMA_SP(OPERAND, 128, TYPES, TAIL, 64, 65, 66, 67, 68)         \
  SP24_DEFINE_WGMMA_SP(OPERAND, 192, TYPES, TAIL, 96, 97, 98, 99, 100)        \
  SP24_DEFINE_WGMMA_SP(OPERAND, 256, TYPES, TAIL, 128, 129, 130, 131, 132)

// The same with A in registers, for N 256.
template <class Operand>
struct WgmmaSpRegisters;

#define SP24_DEFINE_WGMMA_SP_REGISTERS(OPERAND, TYPES, TAIL)                                       \
  template <>                                                                                      \
  struct WgmmaSpRegisters<OPERAND> {                                                               \
    template <int Sel>                                                                             \
    static __device__ __forceinline__ void issue(float (&d)[128], const uint32_t (&a)[4],          \
                                                 uint64_t b, uint32_t meta, uint32_t accumulate) { \
      asm volatile(                                                                                \
          "{\n"                                                                                    \
          ".reg .pred p;\n"                                                                        \
          "setp.ne.b32 p, %134, 0;\n"                                                              \
          "wgmma.mma_async.sp.sync.aligned.m64n256" TYPES " {" SP24_N256_REGS "},"                 \
          " {%128, %129, %130, %131}, %132, %133, %135, p, 1, 1" TAIL ";\n"                        \
          "}\n"                                                                                    \
          : SP24_N256_ACC                                                                          \
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta), "r"(accumulate),        \
            "n"(Sel));                                                                             \
    }                                                                                              \
  };

}  // namespace sp24::ptx
