# SPDX-License-Identifier: Apache-2.0
# Doxygen's filter for headers in C, whose comments are plain ones there: /* above a declaration or behind it. What
# stands before `extern "C"` and headings between dashes are nobody's. Defaults are for the compiler.
s/ HALFSTEP_DEFAULT\([^;]*\);/;/
/extern "C" \{/,$ {
  /^\/\* ---/ {
    n
    b
  }
  /\/\* ---/ b
  s|^( *)/\* |\1/** |
  t
  s|/\* |/**< |
}
