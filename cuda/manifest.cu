// Host program: prints what kernels.def's configurations follow to, as JSON. build.py runs it, so
// that no number of a kernel is typed twice.
#include <cstddef>
#include <cstdio>
#include <type_traits>

#include "sp24/ladder_entry.cuh"

namespace {

const char* separator = "\n";

// `scales`: those that the loop over K applies; `weight_scales`: those that widened weights meet before.
template <class Config>
void gemm(const char* name, const char* operand, const char* out, const char* order,
          const char* scales, const char* weight_scales = "none") {
  using Operand = typename Config::Operand;
  constexpr bool kPrecise = Config::kPromoted && !Config::kScaledInLoop;
  // The sums of integers themselves take no scale.
  constexpr bool kScaled = !std::is_same_v<typename Config::Out, sp24::out_s32>;
  const bool weights_scaled = weight_scales[0] != 'n';
  std::printf(
      "%s{\"name\": \"%s\", \"kind\": \"gemm\", \"fatbin\": \"gemm_%s%s\", \"a_type\": \"%s\", "
      "\"b_type\": \"%s\", \"out_type\": \"%s\", \"order\": \"%s\", \"accumulate\": \"%s\", "
      "\"promote_k\": %d, \"loop_scales\": \"%s\", \"weight_scales\": \"%s\", "
      "\"scales\": [%s%s%s%s%s], \"layout\": \"%s\", "
      "\"tile_m\": %d, \"tile_n\": %d, \"tile_k\": %d, \"consumers\": %d, \"cluster\": %d, "
      "\"split\": %d, \"balanced\": %s, \"stages\": %d, \"stage_blocks\": %d, \"threads\": %d, "
      "\"smem_bytes\": %zu, \"block_bytes\": %d, \"box_rows_b\": %d, \"box_bytes_b\": %d, \"k_multiple\": %d, \"args\": \"gemm\"}",
      separator, name, Operand::kWidened ? "e4m3_widened" : operand,
      Config::kScaledInLoop ? "_blocks" : kPrecise ? "_precise" : "", Operand::kTypeA,
      Operand::kTypeB, out, order, Operand::kSum, Config::kPromoteK, scales, weight_scales,
      kScaled ? "\"tensor\", \"vector\"" : "", Config::kScaledInLoop ? ", \"block\"" : "",
      weights_scaled ? ", \"" : "", weights_scaled ? weight_scales : "", weights_scaled ? "\"" : "",
      Operand::kWidened ? "widened" : "sm90",
      Config::kTileM, Config::kTileN, Config::kTileK, Config::kConsumers, Config::kCluster,
      Config::kSplit, Config::kBalanced ? "true" : "false", Config::kStages, Config::kStageBlocks,
      Config::kThreads,
      sizeof(typename Config::Shared), Config::kBlockBytes, Config::kBoxRowsB, sp24::kRowBytesB, Operand::kGroup);
  separator = ",\n";
}

void pack(const char* name, const char* operand) {
  std::printf(
      "%s{\"name\": \"%s\", \"kind\": \"pack\", \"fatbin\": \"gemm_%s\", \"a_type\": \"%s\", "
      "\"threads\": %d, \"smem_bytes\": 0, \"args\": \"pack\"}",
      separator, name, operand, operand, sp24::kPackThreads);
  separator = ",\n";
}

void pack_widened(const char* name, const char* scales) {
  std::printf(
      "%s{\"name\": \"%s\", \"kind\": \"pack_widened\", \"fatbin\": \"gemm_e4m3_widened\", "
      "\"a_type\": \"e4m3\", \"source\": \"%s\", \"threads\": %d, \"smem_bytes\": 0, "
      "\"args\": \"pack_widened\"}",
      separator, name, scales, sp24::kPackThreads);
  separator = ",\n";
}

template <class Config>
void ceiling(const char* name, const char* operand, const char* source) {
  std::printf(
      "%s{\"name\": \"%s\", \"kind\": \"ceiling\", \"fatbin\": \"gemm_%s\", \"a_type\": \"%s\", "
      "\"source\": \"%s\", \"tile_m\": %d, \"tile_n\": %d, \"tile_k\": %d, \"tile_stages\": %d, "
      "\"threads\": %d, \"smem_bytes\": %zu, \"args\": \"ceiling\"}",
      separator, name, operand, operand, source, Config::kTileM, Config::kTileN, Config::kTileK,
      Config::kTileStages, Config::kThreads, sizeof(typename Config::Shared));
  separator = ",\n";
}

template <class Config>
void rung(const char* name, const char* operand, const char* out, const char* kind, int number,
          const char* label, const char* source, const char* meta, const char* full,
          const char* release, const char* store, const char* changed) {
  std::printf(
      "%s{\"name\": \"%s\", \"kind\": \"rung\", \"fatbin\": \"ladder_%s\", \"a_type\": \"%s\", "
      "\"out_type\": \"%s\", \"order\": \"nm\", \"number\": %d, \"label\": \"%s\", \"side\": %s, "
      "\"changed\": \"%s\", \"source\": \"%s\", \"meta\": \"%s\", \"full\": \"%s\", "
      "\"release\": \"%s\", \"store\": \"%s\", \"groups\": %d, \"wait\": %d, "
      "\"persistent\": %s, \"raster\": %s, \"unroll\": %d, "
      "\"tile_m\": %d, \"tile_n\": %d, \"tile_k\": %d, \"consumers\": %d, \"cluster\": %d, "
      "\"cluster_ctas\": %d, \"stages\": %d, \"threads\": %d, \"smem_bytes\": %zu, "
      "\"box_a\": [%d, %d], \"box_b\": [%d, %d], \"box_meta\": [%d, %d], "
      "\"k_multiple\": 4, \"args\": \"rung\"}",
      separator, name, operand, operand, out, number, label, kind[0] == 's' ? "true" : "false",
      changed, source, meta, full, release, store, Config::kGroups, Config::kWait,
      Config::kPersistent ? "true" : "false", Config::kRaster ? "true" : "false", Config::kUnroll,
      Config::kTileM, Config::kTileN, Config::kTileK, Config::kConsumers, Config::kCluster,
      Config::kClusterCtas, Config::kStages, Config::kThreads, sizeof(typename Config::Shared),
      Config::kSwizzle,
      sp24::kBlockRows, sp24::kRowBytesB, Config::kBoxRowsB, sp24::kMetaRowBytes * Config::kPanels,
      Config::kMetaRows);
  separator = ",\n";
}

// `source` is the type of what is converted, or its bits where only the size matters.
void conversion(const char* name, const char* kind, const char* operand, const char* source,
                int smem_bytes, const char* args) {
  std::printf(
      "%s{\"name\": \"%s\", \"kind\": \"%s\", \"fatbin\": \"quantize\", \"a_type\": \"%s\", "
      "\"source\": \"%s\", \"threads\": %d, \"smem_bytes\": %d, \"args\": \"%s\"}",
      separator, name, kind, operand, source, sp24::kConvertThreads, smem_bytes, args);
  separator = ",\n";
}

// A parameter struct that no tensor map comes before.
void begin_args(const char* name, size_t bytes) {
  std::printf("]},\n\"%s\": {\"tensor_map_bytes\": 0, \"bytes\": %zu, \"fields\": [", name, bytes);
}

}  // namespace

#define SP24_STRING_(x) #x
#define SP24_STRING(x) SP24_STRING_(x)

int main() {
  std::printf("{\"kernels\": [");
#define SP24_GEMM(operand, out, order, tile_n, consumers, cluster, stages, split)                \
  gemm<SP24_GEMM_CONFIG(operand, out, order, tile_n, consumers, cluster, stages, split)>(        \
      SP24_STRING(SP24_GEMM_NAME(operand, out, order, tile_n, consumers, cluster, stages, split)), \
      #operand, #out, #order, "none");
#define SP24_PROMOTED(operand, out, order, tile_n, consumers, cluster, stages, split, accumulate)    \
  {                                                                                                  \
    using Config = SP24_PROMOTED_CONFIG(operand, out, order, tile_n, consumers, cluster, stages,     \
                                        split, accumulate);                                          \
    const char* const scales[] = {"none", "tile", "block", "row"};                                   \
    gemm<Config>(SP24_STRING(SP24_PROMOTED_NAME(operand, out, order, tile_n, consumers, cluster,     \
                                                stages, split, accumulate)),                         \
                 #operand, #out, #order, scales[static_cast<int>(Config::Accumulate::kScales)]);     \
  }
#define SP24_WIDENED(operand, out, order, tile_n, consumers, cluster, stages, split, scales)         \
  gemm<SP24_WIDENED_CONFIG(operand, out, order, tile_n, consumers, cluster, stages, split, scales)>( \
      SP24_STRING(SP24_WIDENED_NAME(operand, out, order, tile_n, consumers, cluster, stages, split,  \
                                    scales)),                                                        \
      #operand, #out, #order, "none", #scales);
#define SP24_PACK_WIDENED(scales) \
  pack_widened(SP24_STRING(SP24_PACK_WIDENED_NAME(scales)), #scales);
#define SP24_PACK(operand) pack(SP24_STRING(SP24_PACK_NAME(operand)), #operand);
#define SP24_CEILING(operand, source)                                                         \
  ceiling<SP24_CEILING_CONFIG(operand, source)>(SP24_STRING(SP24_CEILING_NAME(operand, source)), \
                                                #operand, #source);
#define SP24_RUNG(operand, out, kind, number, name, consumers, stages, row_bytes, source, meta, full, \
                  groups, wait, release, cluster, persistent, raster, store, unroll, changed)        \
  rung<SP24_RUNG_CONFIG(operand, out, kind, number, name, consumers, stages, row_bytes, source, meta, \
                        full, groups, wait, release, cluster, persistent, raster, store, unroll,     \
                        changed)>(SP24_STRING(SP24_RUNG_NAME(operand, out, kind, number, name, )),   \
                                  #operand, #out, #kind, number, #name, #source, #meta, #full,       \
                                  #release, #store, changed);
#define SP24_PRUNE(score, pattern, source)                                                     \
  conversion(SP24_STRING(SP24_PRUNE_NAME(score, pattern, source)), "prune_" #score "_" #pattern, \
             "", #source, 0, "convert");
#define SP24_AMAX(source) \
  conversion(SP24_STRING(SP24_AMAX_NAME(source)), "amax", "", #source, 0, "convert");
#define SP24_SCALES(operand) \
  conversion(SP24_STRING(SP24_SCALES_NAME(operand)), "scales", #operand, "", 0, "scales");
#define SP24_QUANTIZE(operand, source)                                                          \
  conversion(SP24_STRING(SP24_QUANTIZE_NAME(operand, source)), "quantize", #operand, #source, 0, \
             "convert");
#define SP24_TOKENS(operand, source)                                                           \
  conversion(SP24_STRING(SP24_TOKENS_NAME(operand, source)), "tokens", #operand, #source, 0,   \
             "tokens");
#define SP24_SMOOTH_TOKENS(operand, source)                                                    \
  conversion(SP24_STRING(SP24_SMOOTH_TOKENS_NAME(operand, source)), "smooth_tokens", #operand, \
             #source, 0, "tokens");
#define SP24_GATHER(bits)                                                                   \
  conversion(SP24_STRING(SP24_GATHER_NAME(bits)), "gather", "", #bits, sp24::kGatherBytes, \
             "gather");
#define SP24_CLOCKS() conversion(SP24_STRING(SP24_CLOCKS_NAME()), "clocks", "", "", 0, "clocks");
#include "kernels.def"
  const char* comma = "";
  std::printf("\n],\n\"args\": {\n\"gemm\": {\"tensor_map_bytes\": %zu, \"bytes\": %zu, \"fields\": [",
              sizeof(sp24::MapsB), sizeof(sp24::GemmArgs));
#define X(type, name)                                                                         \
  std::printf("%s[\"%s\", \"%s\", %zu]", comma, #name, #type, offsetof(sp24::GemmArgs, name)); \
  comma = ", ";
  SP24_GEMM_ARGS(X)
#undef X
  std::printf("]},\n\"pack\": {\"tensor_map_bytes\": 0, \"bytes\": %zu, \"fields\": [",
              sizeof(sp24::PackArgs));
  comma = "";
#define X(type, name)                                                                         \
  std::printf("%s[\"%s\", \"%s\", %zu]", comma, #name, #type, offsetof(sp24::PackArgs, name)); \
  comma = ", ";
  SP24_PACK_ARGS(X)
#undef X
  std::printf("]},\n\"ceiling\": {\"tensor_map_bytes\": 0, \"bytes\": %zu, \"fields\": [",
              sizeof(sp24::CeilingArgs));
  comma = "";
#define X(type, name)                                                                            \
  std::printf("%s[\"%s\", \"%s\", %zu]", comma, #name, #type, offsetof(sp24::CeilingArgs, name)); \
  comma = ", ";
  SP24_CEILING_ARGS(X)
#undef X
  std::printf("]},\n\"rung\": {\"tensor_map_bytes\": %zu, \"bytes\": %zu, \"fields\": [",
              sizeof(sp24::RungMaps), sizeof(sp24::RungArgs));
  comma = "";
#define X(type, name)                                          \
  std::printf("%s[\"%s\", \"%s\", %zu]", comma, #name, #type, \
              offsetof(sp24::RungArgs, gemm) + offsetof(sp24::GemmArgs, name)); \
  comma = ", ";
  SP24_GEMM_ARGS(X)
#undef X
#define X(type, name)                                                                         \
  std::printf("%s[\"%s\", \"%s\", %zu]", comma, #name, #type, offsetof(sp24::RungArgs, name)); \
  comma = ", ";
  SP24_RUNG_ARGS(X)
#undef X
#define X(type, name)                                                                     \
  std::printf("%s[\"%s\", \"%s\", %zu]", comma, #name, #type, offsetof(Struct, name)); \
  comma = ", ";
#define SP24_ARGS(name, Type, FIELDS) \
  {                                   \
    using Struct = sp24::Type;        \
    begin_args(name, sizeof(Struct)); \
    comma = "";                       \
    FIELDS(X)                         \
  }
  SP24_ARGS("pack_widened", PackWidenedArgs, SP24_PACK_WIDENED_ARGS)
  SP24_ARGS("convert", ConvertArgs, SP24_CONVERT_ARGS)
  SP24_ARGS("band_counts", BandCounts, SP24_BAND_COUNTS)
  SP24_ARGS("scales", ScalesArgs, SP24_SCALES_ARGS)
  SP24_ARGS("tokens", TokensArgs, SP24_TOKENS_ARGS)
  SP24_ARGS("gather", GatherArgs, SP24_GATHER_ARGS)
  SP24_ARGS("clocks", ClocksArgs, SP24_CLOCKS_ARGS)
#undef X
  std::printf("]}\n}}\n");
}
