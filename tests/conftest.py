"""Where there is no GPU, Triton kernels are interpreted; Triton asks at its first import."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
