#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a program of the C++ that the docs show, so that the tests compile and run it.

usage: docs_snippets.py OUTPUT.cpp FILE.md...

Every block marked cpp becomes a function that is run, with what the text around it takes for granted (a network, an
optimizer, a scaler, a loader, a loss). A block with a function in it stands at file scope. Includes go to the top. Of a
table whose second column is headed Halfstep, the code in that column is compiled and not run; rows with an ellipsis are
left out.
"""
import pathlib
import re
import sys

HEAD = """// Made by scripts/docs_snippets.py from the docs.
#include <halfstep/halfstep.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <vector>

using namespace halfstep;

namespace given {
struct Net : nn::Module<Net> {
  nn::Linear fc1 = child("fc1", nn::Linear{{.in = 784, .out = 512}});
  nn::Linear fc2 = child("fc2", nn::Linear{{.in = 512, .out = 10}});
  Tensor forward(const Tensor& x) const { return fc2(relu(fc1(flatten(x, 1)))); }
};
inline data::MnistDataset digits() { return data::MnistDataset{data::make_digits(data::Split::kTrain, {.count = 256})}; }
}  // namespace given
"""
GIVEN = """  given::Net net;
  optim::SGD optimizer{net.parameters(), {.lr = 0.01}};
  amp::GradScaler scaler;
  data::DataLoader loader{given::digits(), {.batch_size = 64}};
  Tensor x = randn({4, 784}), y = zeros({4}, {.dtype = i64});
  Tensor loss = cross_entropy(net(x), y);
"""
# What the rows of a table speak of.
ROWS = """  given::Net net, model;
  optim::SGD opt{net.parameters(), {.lr = 0.01}};
  amp::GradScaler scaler;
  const auto ds = given::digits();
  const std::string path = "x.safetensors";
  const struct {
    Tensor operator()(const Tensor& input) const { return input * input; }
    Tensor operator()(const std::vector<Tensor>& inputs) const { return inputs[0] * inputs[0]; }
  } f;
  Tensor x = randn({4, 4}, {.dtype = f64, .requires_grad = true}), t = randn({4}), y = sum(x * x), loss = y;
  const Tensor q = randn({1, 2, 3, 4}), k = q, v = q;
  const Tensor scale = ones({4}), zero_point = zeros({4}, {.dtype = i32});
"""
AT_FILE_SCOPE = re.compile(r"^(?:Tensor|Status|void|int|double|bool) \w+\(.*\)(?: \{|;)", re.MULTILINE)


def blocks(text):
    """(line, code) of every cpp block."""
    for match in re.finditer(r"^```cpp\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 2, match[1]


def rows(text):
    """(line, code) of the code in the second column of every row of tables that say what is called how here."""
    names = False
    for number, line in enumerate(text.splitlines(), 1):
        cells = re.split(r"(?<!\\)\|", line)
        if not line.startswith("|"):
            names = False
        elif len(cells) > 3 and cells[2].strip() == "Halfstep":
            names = True
        if not names or not line.startswith("|") or len(cells) < 4 or "as a member" in cells[2]:
            continue
        for code in re.findall(r"`([^`]+)`", cells[2]):
            if "..." not in code and not code.startswith("struct ") and re.search(r"[(\[{]", code):
                yield number, code.replace("\\|", "|").rstrip(";") + ";"


def main():
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    includes, parts, calls = [], [], []
    for file in map(pathlib.Path, sys.argv[2:]):
        text = file.read_text(encoding="utf-8")
        for line, code in blocks(text):
            name = f"{re.sub('[^a-z0-9]', '_', file.stem.lower())}_{line}"
            includes += re.findall(r"^#include.*$", code, re.MULTILINE)
            body = re.sub(r"^(?:#include.*|using namespace halfstep;)$", "", code, flags=re.MULTILINE)
            at = f'#line {line} "{file}"\n'
            if AT_FILE_SCOPE.search(body):
                parts.append(f"namespace {name} {{\n{at}{body}}}\n")
                continue
            parts.append(f"void {name}() {{\n{GIVEN}  {{\n{at}{body}  }}\n}}\n")
            calls.append(name)
        lines = "".join(f'  {{\n#line {line} "{file}"\n{code}\n  }}\n' for line, code in rows(text))
        if lines:
            parts.append(f"void {file.stem}_rows() {{\n{ROWS}{lines}}}\n")
            parts.append(f"void (*volatile {file.stem}_compiled)() = {file.stem}_rows;\n")
    runs = "".join(f"    std::puts(\"{name}\");\n    {name}();\n" for name in calls)
    tail = ("int main() {\n  try {\n" + runs + "  } catch (const std::exception& e) {\n"
            "    std::fprintf(stderr, \"%s\\n\", e.what());\n    return 1;\n  }\n}\n")
    pathlib.Path(sys.argv[1]).write_text("\n".join(dict.fromkeys(includes)) + "\n" + HEAD + "\n".join(parts) + tail, encoding="utf-8")
    return 0 if calls else 1


if __name__ == "__main__":
    sys.exit(main())
