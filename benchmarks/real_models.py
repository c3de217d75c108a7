"""Real models of packages that are installed, with 4 to 10 outputs and small images where they take them."""

__all__ = ["Make", "models"]

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

Make = Callable[[], nn.Module]
TORCHVISION = """alexnet vgg11 vgg11_bn resnet18 resnet50 resnext50_32x4d densenet121 squeezenet1_0 squeezenet1_1
    googlenet inception_v3 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large mnasnet0_5
    shufflenet_v2_x0_5 shufflenet_v2_x1_0 efficientnet_b0 regnet_y_400mf regnet_x_400mf convnext_tiny
    vit_b_16 swin_t"""
PYTORCHCV = """nin_cifar10 resnet20_cifar10 preresnet20_cifar10 seresnet20_cifar10 sepreresnet20_cifar10
    densenet40_k12_cifar10 densenet40_k12_bc_cifar10 resdropresnet20_cifar10
    diapreresnet20_cifar10 shakeshakeresnet20_2x16d_cifar10 resnet56_cifar10 ror3_56_cifar10 rir_cifar10
    pyramidnet110_a48_cifar10 resnext29_32x4d_cifar10 wrn16_10_cifar10 wrn20_10_1bit_cifar10
    diaresnet20_cifar10 xdensenet40_2_k24_bc_cifar10 regnetx002 regnety002"""
PYTORCHCV_LARGE = """resnet10 preresnet10 seresnet10 resnet18_wd4 mobilenet_wd4 mobilenetv2_wd4 mobilenetv3_small_w7d20
    shufflenet_g1_wd4 shufflenetv2_wd2 menet108_8x1_g3 squeezenet_v1_1 squeezeresnet_v1_1 sqnxt23_w1
    darknet_tiny igcv3_wd4 mnasnet_small fdmobilenet_wd4 ghostnet bam_resnet18 cbam_resnet18
    espnetv2_wd2 proxylessnas_mobile"""
TIMM = """resnet18 resnet26d resnet26t resnetv2_50 seresnet18 legacy_seresnet18 ecaresnet26t skresnet18
    resnest14d res2net50_14w_8s mobilenetv2_050 mobilenetv3_small_050 efficientnet_lite0
    tf_efficientnet_b0 mixnet_s mnasnet_050 ghostnet_050 hardcorenas_a regnetx_002 regnety_002
    densenet121 dla34 vovnet39a selecsls42 cspresnet50 darknet53 nf_resnet26 repvgg_a0 hrnet_w18_small
    convnext_atto rexnet_100 xception41 inception_v4 fbnetc_100 lcnet_035 tinynet_e mobileone_s0
    poolformer_s12 vit_tiny_patch16_224 gmixer_24_224 test_resnet test_efficientnet test_efficientnet_gn test_byobnet
    test_convnext test_convnext2 test_nfnet test_mambaout test_vit resnet10t resnet14t ghostnetv2_100 semnasnet_050
    spnasnet_100 mobilenetv1_100 mobilenetv4_conv_small ese_vovnet19b_slim cs3darknet_s starnet_s050 nf_regnet_b0
    repghostnet_050 gcresnet33ts skresnet34 eca_vovnet39b darknet17 sedarknet21 cs3darknet_focus_s nf_ecaresnet26
    nf_seresnet26 repvit_m0_9 starnet_s1 fasternet_t0 hgnetv2_b0 gernet_s convnextv2_atto convnext_zepto_rms
    convnext_atto_ols inception_next_atto edgenext_xx_small mobilevit_xxs efficientvit_b0 shvit_s1 swiftformer_xs
    mambaout_femto poolformerv2_s12 fastvit_t8 dla46_c dla60_res2net regnetz_005 fbnetv3_b tf_efficientnetv2_b0
    mobilenet_edgetpu_100 resnetv2_50d_gn resnetv2_50d_evos resnetv2_50x1_bit"""
TIMM_SMALL = """lcnet_050 mobilenetv2_035 mobilenetv3_small_075 tinynet_d mnasnet_small dla46x_c dla60x_c
    test_convnext3 test_efficientnet_ln test_efficientnet_evos"""
_QUARTER: dict[str, Any] = {"channels": (16, 32, 64, 128)}
_HALF: dict[str, Any] = {"channels": (32, 64, 128, 256)}
_ALIKE: dict[str, dict[str, Any]] = {  # models of timm that take the same arguments, and these arguments
    "resnet10t resnet14t resnet18 resnet26d resnet26t seresnet18 skresnet18 ecaresnet26t resnest14d": _QUARTER,
    "resnetv2_18": _QUARTER,
    "res2net50_14w_8s": {**_QUARTER, "base_width": 16, "layers": (1, 1, 1, 1)},
    "resnext50_32x4d": {**_QUARTER, "cardinality": 4, "base_width": 16, "layers": (1, 1, 1, 1)},
    "resnetv2_50": {**_HALF, "layers": (1, 1, 2, 1), "stem_chs": 16},
    "nf_resnet26 nf_seresnet26 nf_ecaresnet26": {**_HALF, "depths": (1, 1, 2, 1)},
    "nf_regnet_b0": {**_QUARTER, "depths": (1, 1, 2, 1), "num_features": 128},
    "regnetx_002 regnety_002 regnetz_005": {"depth": 8, "w0": 16, "wa": 16.0, "wm": 2.0, "group_size": 8},
    "gernet_s repvgg_a0": {"width_factor": 0.25},
    "convnext_atto convnext_atto_ols convnext_zepto_rms convnextv2_atto mambaout_femto": {
        "dims": (8, 16, 32, 64), "depths": (1, 1, 2, 1),
    },
    "inception_next_atto": {"dims": (16, 32, 64, 96), "depths": (1, 1, 2, 1)},
    "starnet_s050 starnet_s1": {"base_dim": 8, "depths": [1, 1, 2, 1]},
    "fasternet_t0": {"embed_dim": 16, "feature_dim": 128},
    "repvit_m0_9": {"embed_dim": (16, 32, 48, 64), "depth": (1, 1, 2, 1)},
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
    "dla34": {"channels": (8, 8, 16, 32, 64, 128)},
    "rexnet_100 rexnetr_100": {"width_mult": 0.3, "initial_chs": 8, "final_chs": 90},
    "vovnet39a eca_vovnet39b ese_vovnet19b_slim": {
        "stem_chs": (16, 16, 16), "stage_conv_chs": (16, 16, 32, 32), "stage_out_chs": (32, 32, 64, 64),
        "layer_per_block": 3,
    },
}  # fmt: skip
TIMM_NARROW = {name: options for names, options in _ALIKE.items() for name in names.split()}
_UNET: dict[str, Any] = {"decoder_channels": (32, 24, 16, 16, 8)}
SMP_NARROW: dict[str, dict[str, Any]] = {  # decoders with fewer channels, on the encoder test_resnet of timm
    "Unet": _UNET,
    "UnetPlusPlus": _UNET,
    "Linknet": {},
    "FPN": {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32},
    "PSPNet": {"psp_out_channels": 32},
    "DeepLabV3Plus": {"decoder_channels": 16},
    "PAN": {"decoder_channels": 16},
    "UPerNet": {"decoder_channels": 16},
}
SMP = "Unet UnetPlusPlus Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus MAnet PAN"
OWN = 10
_SIZES = {"vit": 224, "mixer": 224, "inception": 96, "ghostnetv2": 64}  # of timm's models that need more than 32


def models() -> Iterator[tuple[str, str, Make, tuple[int, ...]]]:
    """Package, name, maker and input of each model."""
    if tv := _package("torchvision.models"):
        for name in TORCHVISION.split():
            options: dict[str, Any] = {"num_classes": OWN, "weights": None}
            if name in ("googlenet", "inception_v3"):
                options |= {"init_weights": False, "aux_logits": False}
            size = 96 if name == "inception_v3" else 64 if name in ("alexnet", "squeezenet1_0", "squeezenet1_1") else 32
            size = 224 if name in ("vit_b_16", "swin_t") else size
            yield "torchvision", name, lambda n=name, o=options: getattr(tv, n)(**o), (3, size, size)
        yield from _torchvision_narrow(tv)
    if cv := _package("pytorchcv.model_provider"):
        for names, size in ((PYTORCHCV, 32), (PYTORCHCV_LARGE, 224)):
            for name in names.split():
                yield "pytorchcv", name, lambda n=name: cv.get_model(n, num_classes=OWN), (3, size, size)
    if timm := _package("timm"):
        for name in f"{TIMM} {TIMM_SMALL}".split():
            size = next((n for word, n in _SIZES.items() if word in name), 32)
            yield "timm", name, lambda n=name: timm.create_model(n, num_classes=OWN), (3, size, size)
        for name, options in TIMM_NARROW.items():
            yield (
                "timm",
                f"{name} narrow",
                lambda n=name, o=options: timm.create_model(n, num_classes=OWN, **o),
                (3, 32, 32),
            )
    if smp := _package("segmentation_models_pytorch"):
        for name in SMP.split():
            size = 128 if name == "PAN" else 64
            make = lambda n=name: getattr(smp, n)("resnet18", encoder_weights=None, classes=4)  # noqa: E731
            yield "smp", name, make, (3, size, size)
        for name, options in SMP_NARROW.items():
            encoder = {"encoder_name": "tu-test_resnet", "encoder_weights": None, "classes": 4}
            size = 128 if name == "PAN" else 64
            yield "smp", f"{name} narrow", lambda n=name, o=encoder | options: getattr(smp, n)(**o), (3, size, size)
    if nets := _package("monai.networks.nets"):
        yield from _monai(nets)


def _torchvision_narrow(tv: Any) -> Iterator[tuple[str, str, Make, tuple[int, ...]]]:
    convnext = tv.convnext.CNBlockConfig
    makers: dict[str, Make] = {
        "mobilenet_v2": lambda: tv.mobilenet_v2(num_classes=OWN, width_mult=0.25),
        "mnasnet": lambda: tv.MNASNet(0.25, num_classes=OWN),
        "densenet": lambda: tv.DenseNet(8, (2, 2, 2, 2), 16, num_classes=OWN),
        "shufflenet_v2": lambda: tv.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 128], num_classes=OWN),
        "convnext": lambda: tv.ConvNeXt(
            [convnext(8, 16, 1), convnext(16, 32, 1), convnext(32, None, 2)], num_classes=OWN
        ),
    }
    for name, make in makers.items():
        yield "torchvision", f"{name} narrow", make, (3, 32, 32)


def _monai(nets: Any) -> Iterator[tuple[str, str, Make, tuple[int, ...]]]:
    plane: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 4}
    makers: dict[str, Make] = {
        "UNet": lambda: nets.UNet(**plane, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        "UNet_batch": lambda: nets.UNet(**plane, channels=(8, 16, 32), strides=(2, 2), norm="batch", act="relu"),
        "DenseNet_small": lambda: nets.DenseNet(**plane, init_features=16, growth_rate=8, block_config=(2, 2, 2)),
        "AutoEncoder": lambda: nets.AutoEncoder(**plane, channels=(8, 16), strides=(2, 2)),
        "BasicUNet": lambda: nets.BasicUNet(**plane, features=(8, 8, 16, 16, 32, 8)),
        "AttentionUnet": lambda: nets.AttentionUnet(**plane, channels=(8, 16, 32), strides=(2, 2)),
        "SegResNet": lambda: nets.SegResNet(**plane, init_filters=8),
        "DynUNet": lambda: nets.DynUNet(**plane, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
        "DenseNet121": lambda: nets.DenseNet121(**plane),
        "SEResNet50": lambda: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=4),
        "resnet10": lambda: nets.resnet10(spatial_dims=2, n_input_channels=1, num_classes=4),
        "EfficientNetBN": lambda: nets.EfficientNetBN("efficientnet-b0", False, False, 2, 1, 4),
        "FlexibleUNet": lambda: nets.FlexibleUNet(1, 4, "efficientnet-b0", spatial_dims=2),
        "RegUNet": lambda: nets.RegUNet(2, 1, 8, 2, out_channels=4),
        "LocalNet": lambda: nets.LocalNet(2, 1, 8, (0, 1, 2), out_channels=4),
        "VNet": lambda: nets.VNet(**plane),
        "HighResNet": lambda: nets.HighResNet(**plane),
        "ResNet_small": lambda: nets.ResNet("basic", [1, 1, 1, 1], [8, 16, 32, 64], 2, 1, num_classes=4),
        "ResNet_bottleneck": lambda: nets.ResNet("bottleneck", [1, 1, 1, 1], [8, 16, 32, 64], 2, 1, num_classes=4),
        "Regressor": lambda: nets.Regressor((1, 32, 32), (4,), (8, 16), (2, 2)),
        "UNet_plain": lambda: nets.UNet(**plane, channels=(8, 16, 32, 64), strides=(2, 2, 2), act="prelu"),
        "DynUNet_small": lambda: nets.DynUNet(
            **plane, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[8, 16, 32]
        ),
        "Quicknat": lambda: nets.Quicknat(4, 1, 8),
        "HighResNet_small": lambda: nets.HighResNet(
            **plane,
            layer_params=(
                {"name": "conv_0", "n_features": 8, "kernel_size": 3},
                {"name": "res_1", "n_features": 8, "kernels": (3, 3), "repeat": 2},
                {"name": "res_2", "n_features": 16, "kernels": (3, 3), "repeat": 2},
                {"name": "conv_1", "n_features": 16, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            ),
        ),
        "Classifier": lambda: nets.Classifier((1, 32, 32), 4, (8, 16), (2, 2)),
    }
    for name, make in makers.items():
        yield "monai", name, make, (1, 32, 32)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
