// SPDX-License-Identifier: Apache-2.0
// Uses Halfstep as a program outside the repository does: one header, one CMake target.
#include <halfstep/halfstep.h>

#include <iostream>

int main() {
  namespace hs = halfstep;
  const hs::Tensor a = hs::ones({2, 3});
  const hs::Tensor b = hs::ones({3, 4});
  const hs::Tensor c = hs::matmul(a, b);  // through oneDNN
  try {
    hs::matmul(a, a);
    std::cerr << "a product of shapes that don't fit was accepted\n";
    return 1;
  } catch (const hs::Error& error) {  // the exception's type crosses the library's boundary
    std::cout << error.what() << '\n';
  }
  return c.size(0) == 2 && c.size(1) == 4 ? 0 : 1;
}
