"""TVM's translation of PyTorch programs, with each operator in our hands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_adaptive._tvm import IRModule

# From a node of the graph to an expression.
TorchConverter = Callable[[Any], Any]
# The same, with TVM's own converter (None if it has none) and a block builder.
Conversion = Callable[[Any, "TorchConverter | None", Any], Any]


def relax_of_exported_program(program: Any, convert: Conversion) -> IRModule:
    """Translate a ``torch.export.ExportedProgram``; weights become constants.

    ``convert`` is called for each operator, as the program has it.
    """
    from tvm.relax.frontend.torch import from_exported_program

    stock: dict[str, TorchConverter] = {}

    def convert_by(node: Any, importer: Any) -> Any:
        if not stock:
            stock.update(importer.create_convert_map())
        return convert(node, stock.get(node.target.__name__), importer.block_builder)

    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return from_exported_program(
        program,
        unwrap_unit_return_tuple=True,
        custom_convert_map={node.target.__name__: convert_by for node in calls},
        run_ep_decomposition=False,
    )
