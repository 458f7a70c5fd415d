"""Converters of ONNX operators, for those that TVM lacks or converts wrongly."""

from __future__ import annotations

from tvm_adaptive._tvm.onnx_frontend import OnnxConverter
from tvm_adaptive.models.frontend.converters import (
    elementwise,
    fourier,
    fused,
    places,
    quantization,
)
from tvm_adaptive.models.frontend.converters.attention import (
    convert_attention,
    convert_multi_head_attention,
    convert_qattention,
)
from tvm_adaptive.models.frontend.converters.recurrent import convert_recurrent
from tvm_adaptive.models.frontend.converters.resize import convert_resize, convert_upsample

# By the operator's name.
OWN: dict[str, OnnxConverter] = {
    **dict.fromkeys(("ArgMax", "ArgMin"), elementwise.convert_place_of_extreme),
    **dict.fromkeys(("Add", "Div", "Mul", "Sub"), elementwise.convert_arithmetic),
    "Atanh": elementwise.convert_area_tangent,
    "Attention": convert_attention,
    "BatchNormalization": elementwise.refused("training_mode", 1),
    "Cast": elementwise.convert_cast,
    "Clip": elementwise.convert_clip,
    "Col2Im": places.convert_col2im,
    "Constant": elementwise.convert_constant,
    "Concat": elementwise.convert_concat,
    "ConvInteger": quantization.convert_conv_integer,
    "ConvTranspose": places.convert_conv_transpose,
    "CumProd": places.convert_cum_prod,
    "DFT": fourier.convert_dft,
    "DequantizeLinear": quantization.convert_dequantize,
    "Dropout": elementwise.convert_dropout,
    "DynamicQuantizeLinear": quantization.convert_dynamic_quantize,
    **dict.fromkeys(
        ("DynamicQuantizeMatMul", "MatMulIntegerToFloat"), quantization.convert_matmul_to_float
    ),
    **dict.fromkeys(("Elu", "Selu", "ThresholdedRelu"), elementwise.convert_bent),
    "Equal": elementwise.convert_equal,
    "EyeLike": elementwise.convert_eye_like,
    "FusedConv": fused.convert_fused_conv,
    "FusedGemm": fused.convert_fused_gemm,
    "FusedMatMul": fused.convert_fused_matmul,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), convert_recurrent),
    "GroupNormalization": elementwise.convert_group_normalization,
    "IsInf": elementwise.convert_is_inf,
    **dict.fromkeys(
        ("Einsum", "GlobalLpPool", "InstanceNormalization", "LRN"),
        elementwise.convert_in_single_precision,
    ),
    "LayerNormalization": elementwise.convert_layer_normalization,
    "LpNormalization": elementwise.convert_lp_normalization,
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), elementwise.convert_of_many),
    **dict.fromkeys(("AveragePool", "Conv", "LpPool", "MaxPool"), places.convert_windows),
    "MatMulNBits": quantization.convert_packed_product,
    "MultiHeadAttention": convert_multi_head_attention,
    "NonMaxSuppression": places.convert_non_max_suppression,
    "OneHot": elementwise.convert_one_hot,
    "PRelu": elementwise.convert_prelu,
    "Pad": places.convert_pad,
    "Pow": elementwise.convert_pow,
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), quantization.convert_qlinear_pair),
    **dict.fromkeys(
        (
            *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearLeakyRelu"),
            *("QLinearSigmoid", "QLinearSoftmax"),
        ),
        quantization.convert_qlinear_single,
    ),
    "QAttention": convert_qattention,
    "QEmbedLayerNormalization": quantization.convert_qembed_layer_normalization,
    "QGemm": quantization.convert_qgemm,
    "QLinearConcat": quantization.convert_qlinear_concat,
    "QLinearConv": quantization.convert_qlinear_conv,
    "QLinearMatMul": quantization.convert_qlinear_matmul,
    "QLinearWhere": quantization.convert_qlinear_where,
    "QuantizeLinear": quantization.convert_quantize,
    "RMSNormalization": elementwise.convert_rms_normalization,
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceSumSquare"),
        places.convert_composite_reduction,
    ),
    "ReduceLogSumExp": places.convert_log_sum_exp,
    **dict.fromkeys(("ReduceMax", "ReduceMin"), places.convert_extreme),
    "Reshape": elementwise.convert_reshape,
    "Resize": convert_resize,
    "ReverseSequence": places.convert_reverse_sequence,
    "RoiAlign": places.convert_roi_align,
    "STFT": fourier.convert_stft,
    "ScatterElements": places.convert_scatter_elements,
    "SequenceInsert": places.convert_sequence_insert,
    "SimplifiedLayerNormalization": elementwise.convert_rms_normalization,
    **dict.fromkeys(
        ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
        elementwise.convert_skip_layer_normalization,
    ),
    "Slice": places.convert_slice,
    "Softplus": elementwise.convert_softplus,
    "SpaceToDepth": elementwise.refused("mode", b"CRD"),
    "Split": places.convert_split,
    **dict.fromkeys(("QuickGelu", "Swish"), elementwise.convert_swish),
    "TopK": places.convert_top_k,
    "Unsqueeze": places.convert_unsqueeze,
    "Upsample": convert_upsample,
}
MICROSOFT = "com.microsoft"
# In the tables, these are operators of Microsoft's domain, not of ONNX's own.
NOT_STANDARD = frozenset(
    {
        *("FastGelu", "BiasGelu", "QuickGelu", "EmbedLayerNormalization", "Attention"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
        *("FusedConv", "FusedGemm", "FusedMatMul", "MatMulNBits", "MultiHeadAttention"),
        *("QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearLeakyRelu", "QLinearSigmoid"),
        *("QLinearAveragePool", "QLinearGlobalAveragePool", "QLinearSoftmax", "QLinearWhere"),
        *("DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QGemm"),
        "QEmbedLayerNormalization",
    }
)
# These mean the same in both domains.
ALSO_OF_MICROSOFT = frozenset({"DequantizeLinear", "Gelu", "QuantizeLinear"})
# Operators that are written out as ONNX defines them: TVM leaves a part of the definition out.
BY_DEFINITION = frozenset({"MeanVarianceNormalization"})

__all__ = ["ALSO_OF_MICROSOFT", "BY_DEFINITION", "MICROSOFT", "NOT_STANDARD", "OWN"]
