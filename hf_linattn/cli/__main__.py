"""`python -m hf_linattn.cli`."""

import sys

from .main import main

sys.exit(main())
