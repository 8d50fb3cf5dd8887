// Turns the SP24_RUNG rows of kernels.def into extern "C" kernels.
#pragma once
#include "sp24/entry.cuh"
#include "sp24/ladder.cuh"

#define SP24_RUNG_CONFIG(operand, out, kind, number, name, consumers, stages, row_bytes, source, meta, \
                         full, groups, wait, release, cluster, persistent, raster, store, unroll,      \
                         changed)                                                                      \
  sp24::RungConfig<sp24::operand, sp24::out_##out, consumers, stages, row_bytes,                       \
                   sp24::ladder::Source::source, sp24::ladder::Meta::meta, sp24::ladder::Full::full,   \
                   groups, wait, sp24::ladder::Release::release, cluster, persistent, raster,          \
                   sp24::ladder::Store::store, unroll>
#define SP24_RUNG_NAME(operand, out, kind, number, name, ...) rung_##operand##_##name

#define SP24_DEFINE_RUNG(...)                                                                    \
  extern "C" __global__ void __cluster_dims__(SP24_RUNG_CONFIG(__VA_ARGS__)::kCluster, 1, 1)     \
      __launch_bounds__(SP24_RUNG_CONFIG(__VA_ARGS__)::kThreads, 1)                              \
          SP24_RUNG_NAME(__VA_ARGS__)(const __grid_constant__ sp24::RungMaps maps,               \
                                      const __grid_constant__ sp24::RungArgs args) {             \
    sp24::ladder::rung<SP24_RUNG_CONFIG(__VA_ARGS__)>(maps, args);                               \
  }
