"""What kernels do: lifting their masks, loading them from releases, reading them out."""
