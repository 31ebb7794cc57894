# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of tests/models/peer_networks_test.cpp.

usage: peer_networks.py write NAME DIR   a network with random weights to DIR/peer.pth and, in the form before PyTorch 1.6,
                                         DIR/legacy.pth; images, its logits and five steps of training to DIR/others.pth
       peer_networks.py check NAME DIR   DIR/trained.pth, written by Halfstep, loads strictly, gives the logits that
                                         Halfstep had, in DIR/ours.pth, and is near what PyTorch trained in float64

The network is torchvision's where that is installed and has it, else that of tests/goldens/torch_models.py, which the goldens
hold against torchvision's."""
import pathlib
import sys

import torch
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "goldens"))
from torch_models import REGISTRY, numbers  # noqa: E402

try:
    from torchvision import models as reference
except ImportError:
    reference = None

IMAGES = 8
# As large as keeps rounding, which each step magnifies, small beside what the loss falls by.
LR = {"resnet50": 1e-4, "resnet20": 0.05}


def made(name):
    return getattr(reference, name, REGISTRY[name])()


def network(name):
    """As training leaves one: statistics and weights of batch norms are not the initial ones."""
    torch.manual_seed(50)
    net = made(name)
    # Small where a block ends, as in trained networks: otherwise fifty layers magnify rounding to the loss's size.
    last = "bn3.weight" if "layer1.0.bn3.weight" in net.state_dict() else "bn2.weight"
    for key, t in net.state_dict().items():
        if key.endswith(("running_mean", "bias")):
            t.copy_(0.1 * torch.randn(t.shape))
        elif key.endswith("running_var") or t.dim() == 1:
            t.copy_((0.5 + 0.5 * torch.rand(t.shape)) * (0.2 if key.endswith(last) else 1))
        elif key.endswith("num_batches_tracked"):
            t.fill_(1000)
    return net


def images(name):
    """Clouds of colour, one unlike the other: batch norm would magnify the small differences of images of noise."""
    size = 32 if name == "resnet20" else 96
    return F.interpolate(2 * numbers(1000, IMAGES, 3, 4, 4).float(), size=(size, size), mode="bilinear")


def logits_of(net, x):
    net.eval()
    with torch.no_grad():
        return net(x)


def train(net, x, labels, lr):
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
    return torch.stack(losses)


def apart(a, b, start):
    """How far apart two trained states are, as a share of how far the second went."""
    for key in start:
        assert not key.endswith("num_batches_tracked") or a[key] == b[key], key
    norm = lambda x, y: sum(float((x[k].double() - y[k].double()).square().sum()) for k in start) ** 0.5
    return torch.tensor(norm(a, b) / norm(b, start), dtype=torch.float64)


def write(name, folder):
    net = network(name)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    torch.save(net.state_dict(), folder / "peer.pth")
    torch.save(net.state_dict(), folder / "legacy.pth", _use_new_zipfile_serialization=False)
    x = images(name)
    logits = logits_of(net, x)
    labels = torch.arange(IMAGES) * (logits.shape[1] // 10)
    others = {"x": x, "labels": labels, "logits": logits, "losses": train(net, x, labels, LR[name])}
    others["lr"] = torch.tensor(LR[name], dtype=torch.float64)
    # What float32's rounding does: the same in float64.
    exact = network(name).double()
    others["losses64"] = train(exact, x.double(), labels, LR[name])
    others["apart64"] = apart(net.state_dict(), exact.state_dict(), state)
    others.update({f"after.{k}": v for k, v in exact.state_dict().items()})
    torch.save(others, folder / "others.pth")
    print(f"{name} of {'torchvision' if hasattr(reference, name) else 'torch_models.py'}: {len(state)} entries")
    return 0


def check(name, folder):
    trained, start, others, ours = (
        torch.load(folder / f"{file}.pth", weights_only=True) for file in ("trained", "peer", "others", "ours"))
    net = made(name)
    print(net.load_state_dict(trained, strict=True))
    logits = logits_of(net, others["x"])
    off = float((ours["logits"] - logits).abs().max() / logits.abs().max())
    after = {key.removeprefix("after."): t for key, t in others.items() if key.startswith("after.")}
    way, spread = apart(trained, after, start), others["apart64"]
    print(f"logits of the trained weights differ by {off:.2g} of the largest; the weights are apart by {way:.2g} of the way that "
          f"training went from PyTorch's in float64, PyTorch's own in float32 by {spread:.2g}")
    # Weights: as the losses in peer_networks_test.cpp.
    return 0 if off <= 1e-4 and way <= 10 * spread + 1e-5 and spread < 1e-3 else 1


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit({"write": write, "check": check}[sys.argv[1]](sys.argv[2], pathlib.Path(sys.argv[3])))
