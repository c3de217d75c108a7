"""`orthoconv serve`: a local page that certifies and attacks images."""

__all__ = ["serve"]

from pathlib import Path

from orthoconv.devices import choose_device
from orthoconv.lab.opening import open_model
from orthoconv.lab.serving.server import Server
from orthoconv.lab.serving.service import Service


def serve(model: str, port: int = 8000, device: str = "auto", local: bool = False) -> None:
    """Serve a page on this machine: drop or draw an image, see its class and its radius, and attack it.

    Example: orthoconv serve runs/digits

    Args:
        model: Folder of a run, a .safetensors file, or the name of a network that comes with the package.
        port: Port of the page; 0 for any that is free. It can be reached from this machine alone.
        device: Device that computes: auto (an accelerator, if torch finds one), cpu, cuda, cuda:1, mps or xpu.
        local: Whether to look for larger radii by local certificates, for networks of affine layers and MaxMin. This
            takes some seconds an image.
    """
    network = open_model(model).to(choose_device(device))
    with Server(Service(network, Path(model).name or model, local=local), port) as server:
        print(f"{model} is served at {server.url} (stop it with Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")
