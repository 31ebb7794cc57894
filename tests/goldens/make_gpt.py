# SPDX-License-Identifier: Apache-2.0
"""gpt.json: logits and five steps of training of a small GPT in float64. The network is the benchmark's (benchmarks/peers/torch_gpt.py)."""
import sys

import torch
from golden_format import HERE, GoldenFile
from torch_models import fill

sys.path.insert(0, str(HERE.parent.parent / "benchmarks" / "peers"))
from torch_gpt import GPT, loss_of  # noqa: E402


def trajectory(file, name, vocabulary, context, layers, heads, width, bias):
    net = fill(GPT(vocabulary, context, layers, heads, width, bias).double())
    sequences, tokens = 3, context - 1
    # Each is a row of multiples, in which the next token can be learnt.
    ids = (torch.arange(tokens + 1) * torch.arange(1, sequences + 1)[:, None]) % vocabulary
    inputs, targets = ids[:, :-1], ids[:, 1:]
    before = net(inputs)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_of(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    file.add(name, "gpt", "", {"vocabulary": vocabulary, "context": context, "layers": layers, "heads": heads, "width": width,
                               "bias": bias, "lr": 0.02},
             inputs=[inputs, targets], outputs=[before, net(inputs)], tensors={"losses": torch.stack(losses)})


def make():
    file = GoldenFile("gpt.json")
    trajectory(file, "gpt/biases", 13, 9, 2, 3, 12, True)
    trajectory(file, "gpt/plain", 7, 6, 3, 1, 8, False)
    file.write()
