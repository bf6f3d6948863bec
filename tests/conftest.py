"""One thread a process, here and in all that tests start: they share few cores."""

import os

# Before torch is imported. That no bit depends on it: tests/kernel/test_surroundings.py.
os.environ.setdefault("OMP_NUM_THREADS", "1")
