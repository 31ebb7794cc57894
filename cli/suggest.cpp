// SPDX-License-Identifier: Apache-2.0
#include "cli/suggest.h"

#include <algorithm>
#include <cctype>

namespace halfstep::cli {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

// Insertions, deletions, replacements and swaps of neighbours that lead from one word to the other.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> d(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& choices) {
  constexpr std::size_t kLongest = 64;  // nobody means a flag by more
  if (word.empty() || word.size() > kLongest) return {};
  const std::string given = lower(word);
  std::string best;
  std::size_t least = given.size() / 3 + 1;
  for (const std::string& choice : choices) {
    const std::string known = lower(choice);
    // What was begun and not finished is nearer than any slip.
    const bool begun = given.size() >= 3 && known.starts_with(given);
    const std::size_t d = begun ? 0 : distance(given, known);
    if (d < least || (d == least && best.empty())) {
      best = choice;
      least = d;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices) {
  const std::string choice = nearest(word, choices);
  return choice.empty() ? std::string() : "; did you mean " + choice + "?";
}

}  // namespace halfstep::cli
