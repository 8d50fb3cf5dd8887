// Which tile a persistent cluster works on, and in what order.
#pragma once
#include "sp24/args.cuh"

namespace sp24 {

// Tiles are walked in groups of `raster` cluster rows, M fastest, so that the clusters that run
// together read few distinct rows of A and of B and find them in L2. Every other group walks its
// columns backwards, so that it starts with those that L2 still holds.
template <class Config>
struct Schedule {
  int rows, cols, raster, index, stride;

  __device__ __forceinline__ explicit Schedule(const GemmArgs& args)
      : rows((args.m + Config::kTileM * Config::kCluster - 1) / (Config::kTileM * Config::kCluster)),
        cols((args.n + Config::kTileN - 1) / Config::kTileN),
        raster(args.raster),
        index(blockIdx.x / Config::kClusterCtas),
        stride(gridDim.x / Config::kClusterCtas) {}

  __device__ __forceinline__ bool more() const { return index < rows * cols; }

  // The next tile of this CTA, as its first row of A and of B; false when none is left. `m_rank` is
  // the CTA's place along M in its cluster.
  __device__ __forceinline__ bool next(int m_rank, int& m0, int& n0) {
    if (!more()) return false;
    if (cols == 1) {  // as below, without the divisions: a tile of few tokens waits for them
      m0 = (index * Config::kCluster + m_rank) * Config::kTileM;
      n0 = 0;
      index += stride;
      return true;
    }
    const int group = index / (raster * cols), within = index - group * raster * cols;
    const int first = group * raster, height = min(raster, rows - first);
    const int step = within / height, row = first + within - step * height;
    const int col = group % 2 ? cols - 1 - step : step;
    m0 = (row * Config::kCluster + m_rank) * Config::kTileM;
    n0 = col * Config::kTileN;
    index += stride;
    return true;
  }
};

}  // namespace sp24
