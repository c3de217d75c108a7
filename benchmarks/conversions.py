"""Convert real models of packages that are installed, and write a table of what became of each.

    python benchmarks/conversions.py [--only TEXT] [--conv METHOD] [--steps N] [--json FILE] [--table FILE]

A package that is not installed is left out. Each model has 10 classes, and small images where it takes them. The
columns: the Lipschitz bound of the converted model; the signal, that is how large a random change of the input is in
the output; and the accuracy on 64 images of a toy with 4 classes after N steps of training.
"""

import argparse
import importlib
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from orthoconv import ConversionError, convert, lipschitz_bound

Make = Callable[[], nn.Module]
TORCHVISION = """alexnet vgg11 vgg11_bn resnet18 resnet50 resnext50_32x4d densenet121 squeezenet1_0 squeezenet1_1
    googlenet inception_v3 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large mnasnet0_5
    shufflenet_v2_x0_5 shufflenet_v2_x1_0 efficientnet_b0 regnet_y_400mf regnet_x_400mf convnext_tiny
    vit_b_16 swin_t"""
PYTORCHCV = """nin_cifar10 resnet20_cifar10 preresnet20_cifar10 seresnet20_cifar10 sepreresnet20_cifar10
    densenet40_k12_cifar10 shakeshakeresnet20_2x16d_cifar10 resnet56_cifar10 ror3_56_cifar10 rir_cifar10
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
    poolformer_s12 vit_tiny_patch16_224 gmixer_24_224"""
SMP = "Unet UnetPlusPlus Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus MAnet PAN"
OWN = 10


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
    if cv := _package("pytorchcv.model_provider"):
        for names, size in ((PYTORCHCV, 32), (PYTORCHCV_LARGE, 224)):
            for name in names.split():
                yield "pytorchcv", name, lambda n=name: cv.get_model(n, num_classes=OWN), (3, size, size)
    if timm := _package("timm"):
        for name in TIMM.split():
            size = 224 if "vit" in name or "mixer" in name else 96 if "inception" in name else 32
            yield "timm", name, lambda n=name: timm.create_model(n, num_classes=OWN), (3, size, size)
    if smp := _package("segmentation_models_pytorch"):
        for name in SMP.split():
            yield "smp", name, lambda n=name: getattr(smp, n)("resnet18", encoder_weights=None, classes=4), (3, 64, 64)
    if nets := _package("monai.networks.nets"):
        yield from _monai(nets)


def _monai(nets: Any) -> Iterator[tuple[str, str, Make, tuple[int, ...]]]:
    plane: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 4}
    makers: dict[str, Make] = {
        "UNet": lambda: nets.UNet(**plane, channels=(8, 16, 32), strides=(2, 2), num_res_units=1),
        "BasicUNet": lambda: nets.BasicUNet(**plane, features=(8, 8, 16, 16, 32, 8)),
        "AttentionUnet": lambda: nets.AttentionUnet(**plane, channels=(8, 16, 32), strides=(2, 2)),
        "SegResNet": lambda: nets.SegResNet(**plane, init_filters=8),
        "DynUNet": lambda: nets.DynUNet(**plane, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2]),
        "DenseNet121": lambda: nets.DenseNet121(**plane),
        "SEResNet50": lambda: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=4),
        "resnet10": lambda: nets.resnet10(spatial_dims=2, n_input_channels=1, num_classes=4),
        "EfficientNetBN": lambda: nets.EfficientNetBN("efficientnet-b0", False, False, 2, 1, 4),
        "VNet": lambda: nets.VNet(**plane),
        "HighResNet": lambda: nets.HighResNet(**plane),
        "Classifier": lambda: nets.Classifier((1, 32, 32), 4, (8, 16), (2, 2)),
    }
    for name, make in makers.items():
        yield "monai", name, make, (1, 32, 32)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def examine(make: Make, shape: tuple[int, ...], conv: str, steps: int) -> dict[str, Any]:
    """Convert one model, and find out what it is worth."""
    torch.manual_seed(0)
    start = time.perf_counter()
    try:
        new = convert(make().train(), shape, conv=conv)
    except ConversionError as error:
        return {"refused": str(error), "seconds": round(time.perf_counter() - start, 1)}
    bound = lipschitz_bound(new.eval(), shape)
    facts: dict[str, Any] = {"bound": bound, "signal": signal(new, shape)}
    missing = without_gradient(new.train(), shape)
    facts |= {"without_gradient": missing, "parameters": sum(p.numel() for p in new.parameters())}
    if steps:
        facts["accuracy"] = toy_accuracy(new, shape, steps)
    return facts | {"seconds": round(time.perf_counter() - start, 1)}


@torch.no_grad()
def signal(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Norm of the change of the output over that of a random change of the input."""
    source = torch.Generator().manual_seed(0)
    x, d = (torch.rand(4, *shape, generator=source), 1e-2 * torch.randn(4, *shape, generator=source))
    moved = (model(x + d) - model(x)).flatten(1).norm(dim=1)
    return float((moved / d.flatten(1).norm(dim=1)).mean())


def without_gradient(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Parameters that a backward pass leaves without a gradient."""
    y = model(torch.rand(4, *shape))
    (y * torch.randn_like(y)).sum().backward()
    return sum(p.grad is None or not bool(p.grad.isfinite().all()) for p in model.parameters())


def toy(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """64 noisy images of 4 classes: the brightness of each quarter."""
    source = torch.Generator().manual_seed(1)
    labels = torch.arange(64) % 4
    x = 0.3 * torch.rand(64, *shape, generator=source)
    h, w = shape[-2] // 2, shape[-1] // 2
    for image, label in zip(x, labels.tolist(), strict=True):
        image[:, (label // 2) * h : (label // 2 + 1) * h, (label % 2) * w : (label % 2 + 1) * w] += 0.7
    return x, labels


def toy_accuracy(model: nn.Module, shape: tuple[int, ...], steps: int) -> float:
    """Accuracy on the toy after so many steps of Adam; of images, that of the mean over the pixels."""
    x, labels = toy(shape)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def logits(z: Tensor) -> Tensor:
        y = model(z)
        return y.flatten(2).mean(2) if y.ndim > 2 else y

    for k in range(steps):
        batch = torch.arange(16 * k, 16 * k + 16) % 64
        loss = F.cross_entropy(20 * logits(x[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((logits(x).argmax(1) == labels).double().mean())


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = ["| package | model | input | bound | signal | toy | refused |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        name, size = f"| {r['package']} | {r['model']} | {'x'.join(map(str, r['input']))} |", r.get("accuracy")
        if "bound" in r:
            lines.append(
                f"{name} {r['bound']:.7f} | {r['signal']:.2g} | {'' if size is None else f'{100 * size:.0f} %'} | |"
            )
        else:
            lines.append(f"{name} | | | {first_part(r['refused'])} |")
    return "\n".join(lines) + "\n"


def first_part(text: str) -> str:
    """The first part that was refused, and how many more there are."""
    parts = text.splitlines()
    more = f" (and {len(parts) - 2} more)" if len(parts) > 2 else ""
    return (parts[1].strip() if len(parts) > 1 else parts[0])[:160].replace("|", "/") + more


def main() -> None:
    """Convert the models that were asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose package/name contains this text")
    parser.add_argument("--conv", default="cayley", help="method of the convolutions")
    parser.add_argument("--steps", type=int, default=0, help="steps of training on the toy")
    parser.add_argument("--json", type=Path, help="file to add a line to for each model")
    parser.add_argument("--table", type=Path, help="file for the table")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for package, name, make, shape in models():
        if args.only not in f"{package}/{name}":
            continue
        try:
            facts = examine(make, shape, args.conv, args.steps)
        except Exception as error:
            facts = {"refused": f"{type(error).__name__}: {error}", "failed": True}
        rows.append({"package": package, "model": name, "input": shape, **facts})
        print(json.dumps(rows[-1])[:300], flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    converted = sum("bound" in r for r in rows)
    print(f"{converted} of {len(rows)} converted")
    if args.table:
        args.table.write_text(table(rows))


if __name__ == "__main__":
    main()
