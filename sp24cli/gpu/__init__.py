"""The GPU: devices, launches, timing, telemetry and the product. The only importer of CUDA."""
