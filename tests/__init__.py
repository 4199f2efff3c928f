"""The environment of all tests, before anybody loads torch."""

import os

# Torch asks for the name behind every connection; a resolver that doesn't answer costs 5 s each.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# On a busy machine it then warns that it has no name for one.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Some virtual machines announce AMX and don't have it: torch's bfloat16 then ends with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Two processes share the tests, and threads that wait for each other would spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
