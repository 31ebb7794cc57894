#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes power_sgd.json: passes of PowerSGD in float64, as Vogels et al. (2019), algorithms 1 and 2, have it and
PyTorch's powerSGD_hook does it: error feedback with what all ranks' factors leave out of a rank's own gradient, warm
start, Gram and Schmidt's method. Plain Python.

usage: make_power_sgd.py
"""
import json
import math
import pathlib

SHAPES = {"fc.weight": (12, 16), "conv.weight": (8, 3, 3, 3), "small.weight": (3, 4), "fc.bias": (16,)}
PASSES = 4


def gradient(parameter, count, rank, number):
    """Multiples of 1/64, exact in float32; tests/ranks/power_sgd_test.cpp has the same."""
    return [((i * 37 + i * i % 31 * 7 + rank * 101 + number * 53 + parameter * 29) % 97 - 48) / 64 for i in range(count)]


def first_factor(rows, columns):
    return [[((i * 5 + j * 11 + i * j * 3) % 13 - 6) / 8 for j in range(columns)] for i in range(rows)]


def transposed(a):
    return [list(row) for row in zip(*a)]


def product(a, b):
    other = transposed(b)
    return [[math.fsum(x * y for x, y in zip(row, column)) for column in other] for row in a]


def mean(matrices):
    return [[math.fsum(values) / len(values) for values in zip(*rows)] for rows in zip(*matrices)]


def orthonormal(a):
    done = []
    for column in transposed(a):
        for unit in done:
            along = math.fsum(x * y for x, y in zip(column, unit))
            column = [x - along * y for x, y in zip(column, unit)]
        norm = math.sqrt(math.fsum(x * x for x in column))
        done.append([x / norm for x in column])
    return transposed(done)


def run(ranks, columns):
    """The means of the last pass, by parameter; and the first factors."""
    result, factors = {}, {}
    for parameter, (name, shape) in enumerate(SHAPES.items()):
        count, n = math.prod(shape), shape[0]
        m = count // n
        compressed = len(shape) > 1 and (n + m) * columns * 2 < n * m
        q = first_factor(m, columns)
        if compressed:
            factors[name] = q
        errors = [[[0.0] * m for _ in range(n)] for _ in range(ranks)]
        for number in range(PASSES):
            own = []
            for rank in range(ranks):
                flat = gradient(parameter, count, rank, number)
                own.append([[flat[i * m + j] for j in range(m)] for i in range(n)])
            if not compressed:
                out = mean(own)
                continue
            own = [[[x + e for x, e in zip(*rows)] for rows in zip(*pair)] for pair in zip(own, errors)]
            q = orthonormal(q)
            p = orthonormal(mean([product(matrix, q) for matrix in own]))
            q = mean([product(transposed(matrix), p) for matrix in own])
            out = product(p, transposed(q))
            errors = [[[x - o for x, o in zip(*rows)] for rows in zip(matrix, out)] for matrix in own]
        result[name] = out
    return result, factors


def tensor(matrix, shape):
    data = ",".join(f"{value:.10g}" for row in matrix for value in row)
    return f'{{"dtype":"f64","shape":{json.dumps(list(shape))},"data":[{data}]}}'


def main():
    lines = []
    for ranks in (2, 3, 4):
        for columns in (1, 2):
            means, factors = run(ranks, columns)
            tensors = {f"mean.{name}": tensor(value, SHAPES[name]) for name, value in means.items()}
            for name, value in factors.items():
                tensors[f"q.{name}"] = tensor(value, (len(value), columns))
            text = ",".join(f'"{name}":{value}' for name, value in tensors.items())
            lines.append(f'{{"name":"power_sgd/{ranks}/{columns}","op":"power_sgd","attributes":{{"ranks":{ranks},'
                         f'"rank":{columns},"passes":{PASSES}}},"tensors":{{{text}}}}}')
    path = pathlib.Path(__file__).resolve().parent / "power_sgd.json"
    header = json.dumps({"format": 1, "made_by": "tests/goldens/make_power_sgd.py"})
    path.write_text('{"header":' + header + ',"entries":[\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
