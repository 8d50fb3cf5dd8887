"""The prebuilt kernels: fatbins and the manifest that describes every entry."""
