"""Converters of ONNX operators, for those that TVM lacks or converts wrongly."""

from __future__ import annotations

from tvm_adaptive._tvm.onnx_frontend import OnnxConverter
from tvm_adaptive.models.frontend.converters import (
    elementwise,
    fourier,
    places,
    quantization,
    recurrent,
    resize,
)

# By the operator's name.
OWN: dict[str, OnnxConverter] = {
    "Add": elementwise.of_two("Add"),
    "BatchNormalization": elementwise.refused("BatchNormalization", "training_mode", 1),
    "Cast": elementwise.convert_cast,
    "Clip": elementwise.convert_clip,
    "Col2Im": places.convert_col2im,
    "Constant": elementwise.convert_constant,
    "ConvInteger": quantization.convert_conv_integer,
    "ConvTranspose": places.convert_conv_transpose,
    "CumProd": places.convert_cum_prod,
    "DFT": fourier.convert_dft,
    "DequantizeLinear": quantization.convert_dequantize,
    "Div": elementwise.of_two("Div"),
    "Dropout": elementwise.convert_dropout,
    "EyeLike": elementwise.convert_eye_like,
    "GRU": recurrent.convert_gru,
    "GroupNormalization": elementwise.convert_group_normalization,
    "IsInf": elementwise.convert_is_inf,
    "LSTM": recurrent.convert_lstm,
    "LayerNormalization": elementwise.convert_layer_normalization,
    "LpNormalization": elementwise.convert_lp_normalization,
    "Max": elementwise.of_many("Max"),
    "Mean": elementwise.of_many("Mean"),
    "Min": elementwise.of_many("Min"),
    "Mul": elementwise.of_two("Mul"),
    "NonMaxSuppression": places.convert_non_max_suppression,
    "OneHot": elementwise.convert_one_hot,
    "Pad": places.convert_pad,
    "Pow": elementwise.convert_pow,
    "QLinearConv": quantization.convert_qlinear_conv,
    "QLinearMatMul": quantization.convert_qlinear_matmul,
    "QuantizeLinear": quantization.convert_quantize,
    "RMSNormalization": elementwise.convert_rms_normalization,
    "RNN": recurrent.convert_rnn,
    "ReduceMax": places.convert_reduced_truth("ReduceMax"),
    "ReduceMin": places.convert_reduced_truth("ReduceMin"),
    "Resize": resize.convert_resize,
    "ReverseSequence": places.convert_reverse_sequence,
    "ScatterElements": places.convert_scatter_elements,
    "RoiAlign": elementwise.refused("RoiAlign", "mode", b"max"),
    "STFT": fourier.convert_stft,
    "SpaceToDepth": elementwise.refused("SpaceToDepth", "mode", b"CRD"),
    "Sub": elementwise.of_two("Sub"),
    "Sum": elementwise.of_many("Sum"),
    "Swish": elementwise.convert_swish,
    "TopK": places.convert_top_k,
    "Upsample": resize.convert_upsample,
}
# TVM's own that compute something else; ONNX's definition takes their place.
WRONG: frozenset[str] = frozenset()
# In TVM's table, these are operators of Microsoft's domain, not of ONNX's own.
NOT_STANDARD = frozenset(
    {"FastGelu", "BiasGelu", "SkipLayerNormalization", "EmbedLayerNormalization", "Attention"}
)

__all__ = ["NOT_STANDARD", "OWN", "WRONG"]
