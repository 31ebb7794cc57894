// SPDX-License-Identifier: Apache-2.0
#include "halfstep/io/drawing.h"

#include <cairo/cairo.h>
#ifdef __SANITIZE_ADDRESS__
#include <dlfcn.h>
#endif

#include <cmath>
#include <cstdlib>
#include <memory>
#include <utility>

#include "halfstep/core/atomic_file.h"
#include "halfstep/core/fail.h"
#include "halfstep/core/overloaded_internal.h"
#include "halfstep/core/text.h"

namespace halfstep::io {
namespace {

using halfstep::detail::Overloaded;
// Code points of valid UTF-8.
std::size_t bytes_of_character(char first) {
  const auto c = static_cast<unsigned char>(first);
  return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

// Widths of the common sans-serif fonts, rather too large than too small.
double character_width(std::string_view character) {
  if (character.size() > 1) return character.size() > 2 ? 1.0 : 0.65;
  const char c = character[0];
  if (std::string_view("iljtfrI.,:;'|! ()[]").find(c) != std::string_view::npos) return 0.38;
  if (std::string_view("mwMW@%").find(c) != std::string_view::npos) return 0.95;
  return c >= 'A' && c <= 'Z' ? 0.7 : 0.62;
}

std::string hex(Color c) { return fmt::format("#{:02x}{:02x}{:02x}", c.red, c.green, c.blue); }

std::string number(double v) {
  std::string text = fmt::format("{:.2f}", std::isfinite(v) ? v : 0);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string xml(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

// U+FFFE and U+FFFF are valid UTF-8 and no characters: neither XML nor cairo takes them.
std::string drawable(std::string_view text) {
  std::string shown = printable(text);
  for (const char* none : {"\xef\xbf\xbe", "\xef\xbf\xbf"}) {
    for (std::size_t at = 0; (at = shown.find(none, at)) != std::string::npos;) shown.replace(at, 3, "\xef\xbf\xbd");
  }
  return shown;
}

std::string base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string result;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 3; ++k) {
      bits = bits << 8 | (i + k < bytes.size() ? static_cast<unsigned char>(bytes[i + k]) : 0U);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      result += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
    }
  }
  return result;
}

struct Release {
  void operator()(cairo_surface_t* s) const { cairo_surface_destroy(s); }
  void operator()(cairo_t* c) const { cairo_destroy(c); }
};
using Surface = std::unique_ptr<cairo_surface_t, Release>;

void check(cairo_status_t status) {
  if (status != CAIRO_STATUS_SUCCESS) fail<Error>("drawing: {}", cairo_status_to_string(status));
}

Surface surface_of(std::int64_t width, std::int64_t height) {
  // Larger than any figure, and small enough for cairo.
  constexpr std::int64_t kMost = 32000;
  if (width < 1 || height < 1 || width > kMost || height > kMost) {
    fail<Error>("drawing: expected a picture of 1 to {} pixels a side, got {} x {}", kMost, width, height);
  }
  Surface surface(cairo_image_surface_create(CAIRO_FORMAT_RGB24, static_cast<int>(width), static_cast<int>(height)));
  check(cairo_surface_status(surface.get()));
  return surface;
}

Surface surface_of(const Bitmap& bitmap) {
  Surface surface = surface_of(bitmap.width, bitmap.height);
  unsigned char* data = cairo_image_surface_get_data(surface.get());
  const int stride = cairo_image_surface_get_stride(surface.get());
  const std::uint8_t* from = bitmap.pixels.data();
  for (std::int64_t y = 0; y < bitmap.height; ++y) {
    auto* row = reinterpret_cast<std::uint32_t*>(data + y * stride);
    for (std::int64_t x = 0; x < bitmap.width; ++x, from += 3) {
      row[x] = std::uint32_t{from[0]} << 16 | std::uint32_t{from[1]} << 8 | from[2];
    }
  }
  cairo_surface_mark_dirty(surface.get());
  return surface;
}

std::string png_of(cairo_surface_t* surface) {
  std::string bytes;
  const auto append = [](void* to, const unsigned char* data, unsigned length) {
    static_cast<std::string*>(to)->append(reinterpret_cast<const char*>(data), length);
    return CAIRO_STATUS_SUCCESS;
  };
  check(cairo_surface_write_to_png_stream(surface, append, &bytes));
  return bytes;
}

}  // namespace

double text_width(std::string_view text, double size) {
  double width = 0;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t n = bytes_of_character(text[i]);
    width += character_width(text.substr(i, n));
    i += n;
  }
  return width * size;
}

std::string fitted_text(std::string_view text, double size, double width) {
  const std::string shown = printable(text);
  if (text_width(shown, size) <= width) return shown;
  double used = size;  // the ellipsis
  std::size_t end = 0;
  while (end < shown.size()) {
    const std::size_t n = bytes_of_character(shown[end]);
    used += character_width(std::string_view(shown).substr(end, n)) * size;
    if (used > width) break;
    end += n;
  }
  return shown.substr(0, end) + "\xe2\x80\xa6";
}

Drawing::Drawing(double width, double height, std::string title)
    : width_(width), height_(height), title_(drawable(title)) {}

void Drawing::fill(const Box& box, Color color) { shapes_.emplace_back(Fill{box, color}); }

void Drawing::frame(const Box& box, const Pen& pen) {
  const double right = box.x + box.width, below = box.y + box.height;
  shapes_.emplace_back(Lines{{{box.x, box.y}, {right, box.y}, {right, below}, {box.x, below}}, pen, true});
}

void Drawing::lines(std::vector<Point> points, const Pen& pen) {
  if (points.size() > 1) shapes_.emplace_back(Lines{std::move(points), pen});
}

void Drawing::dot(Point center, double radius, Color color) { shapes_.emplace_back(Dot{center, radius, color}); }

void Drawing::text(Point place, std::string_view text, const TextStyle& style) {
  if (!text.empty()) shapes_.emplace_back(Text{place, drawable(text), style});
}

void Drawing::picture(const Box& box, Bitmap bitmap) {
  const bool sane =
      bitmap.width > 0 && bitmap.height > 0 &&
      bitmap.pixels.size() / 3 / static_cast<std::size_t>(bitmap.width) >= static_cast<std::size_t>(bitmap.height);
  if (!sane) {
    fail<Error>("drawing: expected 3 bytes a pixel of a picture of {} x {}, got {} bytes", bitmap.width, bitmap.height,
                bitmap.pixels.size());
  }
  shapes_.emplace_back(Picture{box, std::move(bitmap)});
}

std::string Drawing::svg() const {
  std::string out = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" "
      "height=\"{1}\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\">\n",
      number(width_), number(height_));
  if (!title_.empty()) out += fmt::format("<title>{}</title>\n", xml(title_));
  const auto box_of = [](const Box& b) {
    return fmt::format("x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"", number(b.x), number(b.y), number(b.width),
                       number(b.height));
  };
  out += fmt::format("<rect {} fill=\"#ffffff\"/>\n", box_of({0, 0, width_, height_}));
  const auto draw =
      Overloaded{[&](const Fill& s) { out += fmt::format("<rect {} fill=\"{}\"/>\n", box_of(s.box), hex(s.color)); },
                 [&](const Lines& s) {
                   out += s.closed ? "<polygon points=\"" : "<polyline points=\"";
                   for (const Point& p : s.points) out += fmt::format("{},{} ", number(p.x), number(p.y));
                   out.back() = '"';
                   out += fmt::format(" fill=\"none\" stroke=\"{}\" stroke-width=\"{}\" stroke-linejoin=\"round\"/>\n",
                                      hex(s.pen.color), number(s.pen.width));
                 },
                 [&](const Dot& s) {
                   out += fmt::format("<circle cx=\"{}\" cy=\"{}\" r=\"{}\" fill=\"{}\"/>\n", number(s.center.x),
                                      number(s.center.y), number(s.radius), hex(s.color));
                 },
                 [&](const Text& s) {
                   const std::string x = number(s.place.x), y = number(s.place.y);
                   out += fmt::format("<text x=\"{}\" y=\"{}\" font-size=\"{}\" fill=\"{}\"", x, y,
                                      number(s.style.size), hex(s.style.color));
                   if (s.style.align == Align::center) out += " text-anchor=\"middle\"";
                   if (s.style.align == Align::right) out += " text-anchor=\"end\"";
                   if (s.style.bold) out += " font-weight=\"bold\"";
                   if (s.style.upwards) out += fmt::format(" transform=\"rotate(-90 {} {})\"", x, y);
                   out += fmt::format(">{}</text>\n", xml(s.text));
                 },
                 [&](const Picture& s) {
                   out += fmt::format(
                       "<image {} preserveAspectRatio=\"none\" style=\"image-rendering:pixelated\" "
                       "href=\"data:image/png;base64,{}\"/>\n",
                       box_of(s.box), base64(png_of(surface_of(s.bitmap).get())));
                 }};
  for (const auto& shape : shapes_) std::visit(draw, shape);
  return out + "</svg>\n";
}

std::string Drawing::png(double scale) const {
#ifdef __SANITIZE_ADDRESS__
  // What cairo and fontconfig keep until the process ends is no leak.
  static const bool dropped_at_exit = std::atexit([] {
                                        cairo_debug_reset_static_data();
                                        if (auto* end = reinterpret_cast<void (*)()>(::dlsym(RTLD_DEFAULT, "FcFini")))
                                          end();
                                      }) == 0;
  static_cast<void>(dropped_at_exit);
#endif
  const Surface surface = surface_of(std::llround(std::ceil(width_ * scale)), std::llround(std::ceil(height_ * scale)));
  const std::unique_ptr<cairo_t, Release> context(cairo_create(surface.get()));
  cairo_t* c = context.get();
  cairo_scale(c, scale, scale);
  cairo_set_line_join(c, CAIRO_LINE_JOIN_ROUND);
  const auto set_color = [c](Color color) {
    cairo_set_source_rgb(c, color.red / 255.0, color.green / 255.0, color.blue / 255.0);
  };
  const auto fill_box = [&](const Box& b, Color color) {
    set_color(color);
    cairo_rectangle(c, b.x, b.y, b.width, b.height);
    cairo_fill(c);
  };
  // All of it: the last pixels are parts where a side is no whole number of them.
  set_color(colors::kWhite);
  cairo_paint(c);
  const auto draw =
      Overloaded{[&](const Fill& s) { fill_box(s.box, s.color); },
                 [&](const Lines& s) {
                   set_color(s.pen.color);
                   cairo_set_line_width(c, s.pen.width);
                   cairo_new_path(c);
                   for (const Point& p : s.points) cairo_line_to(c, p.x, p.y);
                   if (s.closed) cairo_close_path(c);
                   cairo_stroke(c);
                 },
                 [&](const Dot& s) {
                   set_color(s.color);
                   cairo_new_path(c);
                   cairo_arc(c, s.center.x, s.center.y, s.radius, 0, 2 * M_PI);
                   cairo_fill(c);
                 },
                 [&](const Text& s) {
                   set_color(s.style.color);
                   cairo_select_font_face(c, "sans-serif", CAIRO_FONT_SLANT_NORMAL,
                                          s.style.bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
                   cairo_set_font_size(c, s.style.size);
                   cairo_text_extents_t extents;
                   cairo_text_extents(c, s.text.c_str(), &extents);
                   const double back = s.style.align == Align::left     ? 0
                                       : s.style.align == Align::center ? extents.x_advance / 2
                                                                        : extents.x_advance;
                   cairo_save(c);
                   cairo_translate(c, s.place.x, s.place.y);
                   if (s.style.upwards) cairo_rotate(c, -M_PI / 2);
                   cairo_move_to(c, -back, 0);
                   cairo_show_text(c, s.text.c_str());
                   cairo_restore(c);
                 },
                 [&](const Picture& s) {
                   const Surface pixels = surface_of(s.bitmap);
                   cairo_save(c);
                   cairo_translate(c, s.box.x, s.box.y);
                   cairo_scale(c, s.box.width / static_cast<double>(s.bitmap.width),
                               s.box.height / static_cast<double>(s.bitmap.height));
                   cairo_set_source_surface(c, pixels.get(), 0, 0);
                   // Enlarged pixels stay squares, and a photograph that is made smaller is averaged.
                   const bool larger = s.box.width * scale >= static_cast<double>(s.bitmap.width);
                   cairo_pattern_set_filter(cairo_get_source(c), larger ? CAIRO_FILTER_NEAREST : CAIRO_FILTER_GOOD);
                   cairo_rectangle(c, 0, 0, static_cast<double>(s.bitmap.width), static_cast<double>(s.bitmap.height));
                   cairo_fill(c);
                   cairo_restore(c);
                 }};
  for (const auto& shape : shapes_) std::visit(draw, shape);
  check(cairo_status(c));
  cairo_surface_flush(surface.get());
  return png_of(surface.get());
}

void Drawing::save(const std::filesystem::path& path, double scale) const {
  const std::string ending = path.extension().string();
  if (ending != ".svg" && ending != ".png") {
    fail<Error>("{}: expected the name of a figure to end in .svg or .png", shown_path(path));
  }
  const std::string bytes = ending == ".svg" ? svg() : png(scale);
  // Not synced: a figure that a power failure takes is drawn again.
  AtomicFile file(path, false);
  file.write(bytes.data(), bytes.size());
  file.commit();
}

}  // namespace halfstep::io
