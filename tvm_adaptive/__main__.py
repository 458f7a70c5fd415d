"""``python -m tvm_adaptive``."""

import sys

from tvm_adaptive.cli import main

sys.exit(main())
