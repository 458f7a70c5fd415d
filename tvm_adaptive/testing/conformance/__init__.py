"""Rules for whoever extends the package; each suite checks one kind of extension.

    from tvm_adaptive.testing.conformance import check_policy
    check_policy(lambda: MyPolicy())

Each check raises AssertionError with the rule and what the extension did. None needs hardware.
"""

from tvm_adaptive.testing.conformance.acquisition import check_acquisition
from tvm_adaptive.testing.conformance.file_format import check_file_format
from tvm_adaptive.testing.conformance.policy import PolicyReport, check_policy
from tvm_adaptive.testing.conformance.search_strategy import check_search_strategy
from tvm_adaptive.testing.conformance.stopping_rule import StoppingReport, check_stopping_rule

__all__ = [
    "PolicyReport",
    "StoppingReport",
    "check_acquisition",
    "check_file_format",
    "check_policy",
    "check_search_strategy",
    "check_stopping_rule",
]
