# SPDX-License-Identifier: Apache-2.0
"""models.json: state dicts of all networks, and logits and trajectories of small ones, in float64; resnet_tiny.pth.

Where torchvision is there (`pip install --no-deps torchvision pillow` into an environment with PyTorch), the networks of
torch_models.py are first held against its own, names and results; the committed file was made so."""
import copy

import torch
from golden_format import DTYPES, HERE, GoldenFile
from torch.nn import functional as F
from torch_models import REGISTRY, MobileNetV2, ResNet, fill, numbers

try:
    from torchvision import models as reference
except ImportError:
    reference = None


def fnv(text):
    """FNV-1a of 64 bits."""
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return f"{h:016x}"


def described(state):
    return "".join(f"{name} {list(t.shape)}\n" for name, t in state.items())


def check_against_torchvision(name, ours):
    """The same state dict, and the same function of it."""
    if not hasattr(reference, name):
        return
    theirs = getattr(reference, name)()
    assert described(ours.state_dict()) == described(theirs.state_dict()), name
    theirs.load_state_dict(fill(ours).state_dict())
    x = numbers(1, 1, 3, 64, 64).float()
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)


def states(file):
    print("models.json:", "held against torchvision" if reference else "without torchvision to hold it against")
    for name, make in REGISTRY.items():
        net = make()
        check_against_torchvision(name, net)
        state = net.state_dict()
        parameters = list(net.parameters())
        file.add(f"state/{name}", "state", "", {
            "hash": fnv(described(state)), "entries": len(state), "tensors": len(parameters),
            "parameters": sum(p.numel() for p in parameters), "last": list(state)[-1]})


def trajectory(file, name, op, net, attributes, images, size, classes, tiny=None, lr=0.05):
    """Logits in evaluation mode, five steps of SGD in training mode, logits again. `bf16` and `f16`: how far PyTorch's own logits
    are from these under autocast, as a share of the largest."""
    fill(net.double())
    if tiny:
        torch.save({k: v.float() if v.is_floating_point() else v for k, v in net.state_dict().items()}, HERE / tiny)
    x = numbers(1000, images, 3, size, size)
    labels = torch.arange(images) % classes
    before = net.eval()(x)
    single = copy.deepcopy(net).float()
    for half in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=half):
            error = (single(x.float()).double() - before).abs().max() / before.abs().max()
        attributes[DTYPES[half]] = float(f"{error:.2g}")
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    after = net.eval()(x)
    file.add(name, op, "", dict(attributes, lr=lr, images=images, size=size, classes=classes), outputs=[before, after],
             tensors={"losses": torch.stack(losses)})


def resnet(file, name, block, layers, width, images, size, classes=10, cifar=False, tiny=None):
    trajectory(file, name, "resnet", ResNet(block, layers, width, classes, cifar),
               {"block": block, "layers": list(layers), "width": width, "cifar": cifar}, images, size, classes, tiny)


def make():
    file = GoldenFile("models.json")
    states(file)
    resnet(file, "resnet/basic", "basic", (2, 1), 8, 4, 33)
    resnet(file, "resnet/bottleneck", "bottleneck", (2, 2, 1, 1), 8, 4, 64)
    resnet(file, "resnet/tiny", "bottleneck", (1, 1), 4, 4, 32, tiny="resnet_tiny.pth")
    resnet(file, "resnet/20", "basic", (3, 3, 3), 16, 4, 16, cifar=True)
    resnet(file, "resnet/18_cifar", "basic", (2, 2, 2, 2), 8, 4, 24, cifar=True)
    trajectory(file, "mobilenet/0.1", "mobilenet", MobileNetV2(0.1, 10, 0.0), {"width": 0.1}, 8, 64, 10, lr=0.01)
    file.write()
