"""Statistics by four Triton kernels per call."""
