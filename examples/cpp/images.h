// Images as Pillow gives them: decoded from PPM, PGM, PNG (with libpng) or JPEG (with libjpeg-turbo), resized and
// cropped. Compile it with -ffp-contract=off: a product that is added before it was rounded changes weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>
#ifdef HAS_JPEG
#include <jpeglib.h>
#endif
#ifdef HAS_PNG
#include <png.h>
#endif

struct Image {
  int height, width, channels;
  std::vector<uint8_t> data;  // [height, width, channels]

  // Sides come from files: a strip of an image may be resized to more rows than an int holds.
  Image(int64_t height, int64_t width, int channels) : height(height), width(width), channels(channels) {
    const int64_t most = 100'000'000;
    if (height < 1 || width < 1 || height > most || width > most || height * width > most)
      throw std::runtime_error("expected an image of 1 to 100 million pixels");
    data.resize(size_t(height) * width * channels);
  }
  uint8_t* row(int y) { return data.data() + size_t(y) * width * channels; }
};

inline Image read_ppm(std::FILE* file) {
  char kind = 0;
  int width = 0, height = 0, most = 0;
  // P2 and P3 hold their pixels as text.
  if (std::fscanf(file, "P%c %d %d %d", &kind, &width, &height, &most) != 4 || (kind != '5' && kind != '6') ||
      most != 255 || std::fgetc(file) == EOF)
    throw std::runtime_error("expected P5 or P6 of 8 bits, without comments");
  Image image(height, width, kind == '6' ? 3 : 1);
  if (std::fread(image.data.data(), 1, image.data.size(), file) != image.data.size())
    throw std::runtime_error("the file ends before its pixels do");
  return image;
}

#ifdef HAS_JPEG
inline Image read_jpeg(std::FILE* file) {
  jpeg_decompress_struct jpeg;
  jpeg_error_mgr errors;
  jpeg.err = jpeg_std_error(&errors);
  errors.error_exit = [](j_common_ptr info) {
    char text[JMSG_LENGTH_MAX];
    info->err->format_message(info, text);
    jpeg_destroy(info);
    throw std::runtime_error(text);
  };
  jpeg_create_decompress(&jpeg);
  jpeg_stdio_src(&jpeg, file);
  jpeg_read_header(&jpeg, TRUE);
  jpeg.out_color_space = jpeg.num_components == 1 ? JCS_GRAYSCALE : JCS_RGB;
  jpeg_start_decompress(&jpeg);
  Image image(jpeg.output_height, jpeg.output_width, jpeg.output_components);
  while (jpeg.output_scanline < jpeg.output_height) {
    uint8_t* row = image.row(jpeg.output_scanline);
    jpeg_read_scanlines(&jpeg, &row, 1);
  }
  jpeg_finish_decompress(&jpeg);
  jpeg_destroy_decompress(&jpeg);
  return image;
}
#endif

#ifdef HAS_PNG
inline Image read_png(std::FILE* file) {
  png_structp png = png_create_read_struct(
      PNG_LIBPNG_VER_STRING, nullptr, [](png_structp, const char* text) { throw std::runtime_error(text); },
      [](png_structp, const char*) {});
  png_infop info = png_create_info_struct(png);
  png_init_io(png, file);
  png_read_info(png, info);
  // 8 bits of grey or of three colours, without alpha.
  png_set_expand(png);
  png_set_strip_16(png);
  png_set_strip_alpha(png);
  const int passes = png_set_interlace_handling(png);
  png_read_update_info(png, info);
  Image image(png_get_image_height(png, info), png_get_image_width(png, info), png_get_channels(png, info));
  for (int pass = 0; pass < passes; ++pass)
    for (int y = 0; y < image.height; ++y) png_read_row(png, image.row(y), nullptr);
  png_destroy_read_struct(&png, &info, nullptr);
  return image;
}
#endif

inline Image read_image(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (!file) throw std::runtime_error(path + " can't be read");
  const int first = std::fgetc(file);
  std::rewind(file);
  try {
    Image image(1, 1, 1);
    if (first == 'P') image = read_ppm(file);
#ifdef HAS_JPEG
    else if (first == 0xFF) image = read_jpeg(file);
#endif
#ifdef HAS_PNG
    else if (first == 0x89) image = read_png(file);
#endif
    else throw std::runtime_error("it is of no format that this program was built with");
    std::fclose(file);
    return image;
  } catch (const std::exception& error) {
    std::fclose(file);
    throw std::runtime_error(path + ": " + error.what());
  }
}

// Converts between grey and colours.
inline Image with_channels(const Image& image, int channels) {
  if (image.channels == channels) return image;
  Image found(image.height, image.width, channels);
  const size_t pixels = size_t(image.height) * image.width;
  for (size_t i = 0; i < pixels; ++i)
    if (channels == 3) {
      std::fill_n(&found.data[3 * i], 3, image.data[i]);
    } else {
      const uint8_t* colour = &image.data[3 * i];
      found.data[i] = (colour[0] * 19595 + colour[1] * 38470 + colour[2] * 7471 + 0x8000) >> 16;
    }
  return found;
}

// Resizes one axis. The image is seen as [outer, side, inner]; each pixel's weights are whole numbers of 22 bits.
inline std::vector<uint8_t> resize_axis(const std::vector<uint8_t>& from, size_t outer, int side, size_t inner, int to,
                                        bool bicubic) {
  const double scale = double(side) / to, filter_scale = std::max(scale, 1.0);
  const double support = (bicubic ? 2.0 : 1.0) * filter_scale, step = 1.0 / filter_scale;
  const auto filter = [&](double x) {
    x = std::fabs(x);
    if (!bicubic) return x < 1 ? 1 - x : 0.0;
    const double a = -0.5;
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0.0;
  };
  std::vector<uint8_t> found(outer * to * inner);
  std::vector<double> shares;
  std::vector<int> weights;
  for (int out = 0; out < to; ++out) {
    const double centre = (out + 0.5) * scale;
    const int begin = std::max(int(centre - support + 0.5), 0), end = std::min(int(centre + support + 0.5), side);
    double sum = 0;
    shares.clear(), weights.clear();
    for (int i = 0; i < end - begin; ++i) {
      shares.push_back(filter((i + begin - centre + 0.5) * step));
      sum += shares.back();
    }
    for (double share : shares) {
      const double fixed = (sum == 0 ? share : share / sum) * (1 << 22);
      weights.push_back(int(fixed + (share < 0 ? -0.5 : 0.5)));
    }
    for (size_t o = 0; o < outer; ++o)
      for (size_t i = 0; i < inner; ++i) {
        int total = 1 << 21;
        for (int k = 0; k < end - begin; ++k) total += from[(o * side + begin + k) * inner + i] * weights[k];
        found[(o * to + out) * inner + i] = std::clamp(total >> 22, 0, 255);
      }
  }
  return found;
}

inline Image resize(const Image& image, int64_t height, int64_t width, bool bicubic) {
  Image found(height, width, image.channels);
  const size_t channels = image.channels;
  const auto columns = [&](const std::vector<uint8_t>& from, int rows) {
    return width == image.width ? from : resize_axis(from, rows, image.width, channels, width, bicubic);
  };
  const auto rows = [&](const std::vector<uint8_t>& from, int columns) {
    return height == image.height ? from : resize_axis(from, 1, image.height, columns * channels, height, bicubic);
  };
  // Pillow begins with the columns, except for narrow strips.
  if (image.height > 100 * int64_t(image.width) && height < image.height)
    found.data = columns(rows(image.data, image.width), height);
  else
    found.data = rows(columns(image.data, image.height), width);
  return found;
}

// The centre of an image. What lies beyond the image is black.
inline Image crop(const Image& image, int height, int width) {
  const auto begin = [](int side, int size) {
    return side >= size ? int(std::nearbyint((side - size) / 2.0)) : -((size - side) / 2);
  };
  Image found(height, width, image.channels);
  const int top = begin(image.height, height), left = begin(image.width, width);
  for (int y = std::max(-top, 0); y < height && y + top < image.height; ++y)
    for (int x = std::max(-left, 0); x < width && x + left < image.width; ++x)
      for (int c = 0; c < image.channels; ++c)
        found.data[(size_t(y) * width + x) * image.channels + c] =
            image.data[(size_t(y + top) * image.width + x + left) * image.channels + c];
  return found;
}
