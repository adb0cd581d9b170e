// Pillow's arithmetic on images [H, W, C] of bytes, C = 1 or 3, bit for bit: tests/ops/test_images.py holds it to that.
// images.cc includes it for each instruction set, with NAME giving the functions' names.

INLINE int64_t clamped(int64_t i, int64_t n) { return i < 0 ? 0 : i < n ? i : n - 1; }
INLINE Byte byte(float v) { return v <= 0 ? 0 : v >= 255 ? 255 : (Byte)v; }
INLINE Byte blend(int from, int to, float share) { return byte((float)from + share * (float)(to - from)); }

// ---------------------------------------------------------------- affine maps

// Where a row of the result comes from: the whole and the broken part of each pixel's place in the source.
struct Places {
  vector<int32_t> x, y, inside;
  vector<double> dx, dy;
  explicit Places(int64_t n) : x(n), y(n), inside(n), dx(n), dy(n) {}

  void find(int64_t height, int64_t width, const double* a, int64_t row) {
    double yin = row + 0.5;
#pragma omp simd
    for (int32_t i = 0; i < (int32_t)width; ++i) {
      double xin = i + 0.5;
      double u = a[0] * xin + a[1] * yin + a[2], v = a[3] * xin + a[4] * yin + a[5];
      inside[i] = (u >= 0) & (u < width) & (v >= 0) & (v < height);
      u = inside[i] ? u - 0.5 : 0;
      v = inside[i] ? v - 0.5 : 0;
      x[i] = (int32_t)u - (u < 0);  // rounded down: it is -0.5 at least
      y[i] = (int32_t)v - (v < 0);
      dx[i] = u - x[i];
      dy[i] = v - y[i];
    }
  }
};

INLINE Pixel cubic(Pixel v1, Pixel v2, Pixel v3, Pixel v4, double d) {
  Pixel p2 = v3 - v1, p3 = 2 * (v1 - v2) + v3 - v4, p4 = v2 - v1 - v3 + v4;
  return v2 + d * (p2 + d * (p3 + d * p4));
}

INLINE Pixel pixel(const Byte* p) { return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_loadu_si32(p))); }

INLINE void put(Pixel v, Byte* out) {
  __m128i found = _mm256_cvttpd_epi32(v), packed = _mm_packs_epi32(found, found);
  _mm_storeu_si32(out, _mm_packus_epi16(packed, packed));
}

// Between the two pixels in the middle of 4 x 4, which stand ``step`` bytes from each other, from ``at`` of rows[0] on.
INLINE void bicubic(const Byte* const* rows, int64_t at, int64_t step, double dx, double dy, Byte* out) {
  auto along = [=](int row) {
    const Byte* p = rows[row] + at;
    return dx == 0 ? pixel(p + step) : cubic(pixel(p), pixel(p + step), pixel(p + 2 * step), pixel(p + 3 * step), dx);
  };
  put(dy == 0 ? along(1) : cubic(along(0), along(1), along(2), along(3), dy), out);
}

INLINE void bilinear(const Byte* upper, const Byte* lower, int64_t step, double dx, double dy, Byte* out) {
  Pixel one = pixel(upper), other = pixel(lower);
  one += (pixel(upper + step) - one) * dx;
  other += (pixel(lower + step) - other) * dx;
  put(one + (other - one) * dy, out);
}

// Image.transform(size, AFFINE, a, BICUBIC or else BILINEAR, fillcolor=fill)
extern "C" void NAME(affine)(int64_t height, int64_t width, int64_t step, const Byte* in, const double* a, bool cubic,
                             const Byte* fill, Byte* out) {
  int64_t n = width * step, stride = n + 4 * step, spill = 4;  // a pixel is read and written as four bytes
  vector<Byte> source(height * stride + spill), row(n + spill);
  vector<const Byte*> lines(height + 4);  // the outermost repeat, and so do a line's pixels
  for (int64_t y = 0; y < height; ++y) {
    Byte* line = &source[y * stride];
    memcpy(line + 2 * step, in + y * n, n);
    for (int i = 0; i < 2; ++i) {
      memcpy(line + i * step, line + 2 * step, step);
      memcpy(line + n + (2 + i) * step, line + n + step, step);
    }
  }
  for (int64_t y = 0; y < height + 4; ++y) lines[y] = &source[clamped(y - 2, height) * stride];
  Byte colour[4] = {fill[0], fill[step > 1], fill[step > 1 ? 2 : 0], 0};
  Places p(width);
  for (int64_t y = 0; y < height; ++y) {
    p.find(height, width, a, y);
    for (int64_t x = 0; x < width; ++x) {  // from left to right: each pixel covers the spill of the one before
      const Byte* const* rows = &lines[p.y[x] + 1];
      int64_t at = (p.x[x] + 1) * step;
      if (!p.inside[x])
        memcpy(&row[x * step], colour, 4);
      else if (cubic)
        bicubic(rows, at, step, p.dx[x], p.dy[x], &row[x * step]);
      else
        bilinear(rows[1] + at + step, rows[2] + at + step, step, p.dx[x], p.dy[x], &row[x * step]);
    }
    memcpy(out + y * n, &row[0], n);
  }
}

// ------------------------------------------------------- along lines: resizing, blur

// [H, W, C] -> [W, H, C], of whole pixels, in blocks that stay in the cache.
INLINE void transposed(int64_t height, int64_t width, int64_t stride, int64_t channels, const Byte* in, Byte* out) {
  const int64_t block = 16;
  for (int64_t x0 = 0; x0 < width; x0 += block)
    for (int64_t y0 = 0; y0 < height; y0 += block)
      for (int64_t x = x0; x < std::min(x0 + block, width); ++x)
        for (int64_t y = y0; y < std::min(y0 + block, height); ++y)
          for (int64_t c = 0; c < channels; ++c)
            out[(x * height + y) * channels + c] = in[y * stride + x * channels + c];
}

static void transpose(int64_t height, int64_t width, int64_t stride, int64_t channels, const Byte* in, Byte* out) {
  channels == 3 ? transposed(height, width, stride, 3, in, out) : transposed(height, width, stride, 1, in, out);
}

const int kBits = 22;  // of a weight, in fixed point

// out[i] = the weighted sum of ``count`` lines of n bytes
static void weighted_line(int64_t n, int64_t count, const Byte* in, int64_t stride, const int32_t* weights,
                          int32_t* sums, Byte* out) {
  for (int64_t i = 0; i < n; ++i) sums[i] = 1 << (kBits - 1);
  for (int64_t j = 0; j < count; ++j) {
    const Byte* line = in + j * stride;
    int32_t weight = weights[j];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sums[i] += line[i] * weight;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    int32_t v = sums[i] >> kBits;
    out[i] = v < 0 ? 0 : v > 255 ? 255 : v;
  }
}

// The weights of ``count`` lines from ``first`` on, of ``to`` that ``from`` lines become.
struct Weights {
  vector<int64_t> starts, counts;
  vector<int32_t> weights;
  int64_t room, begin, end;  // lines that are read: begin..end

  Weights(int64_t from, int64_t to, int64_t first, int64_t count, bool cubic) : starts(count), counts(count) {
    double scale = (double)(float)from / to, stretch = scale < 1 ? 1 : scale;
    double support = (cubic ? 2.0 : 1.0) * stretch, inverse = 1.0 / stretch;
    room = (int64_t)std::ceil(support) * 2 + 1;
    weights.resize(room * count);
    vector<double> shares(room);
    for (int64_t i = 0; i < count; ++i) {
      double centre = (first + i + 0.5) * scale, total = 0;
      int64_t low = std::max((int)(centre - support + 0.5), 0);
      int64_t high = std::min<int64_t>((int)(centre + support + 0.5), from);
      for (int64_t j = low; j < high; ++j) total += shares[j - low] = share((j - centre + 0.5) * inverse, cubic);
      for (int64_t j = low; j < high; ++j) {
        double exact = (total != 0 ? shares[j - low] / total : shares[j - low]) * (1 << kBits);
        weights[i * room + j - low] = (int)(exact + (exact < 0 ? -0.5 : 0.5));
      }
      starts[i] = low;
      counts[i] = high - low;
    }
    begin = starts[0];
    end = starts[count - 1] + counts[count - 1];
  }

  static double share(double x, bool cubic) {
    x = x < 0 ? -x : x;
    if (!cubic) return x < 1 ? 1 - x : 0;
    if (x < 1) return ((-0.5 + 2) * x - (-0.5 + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
  }

  // lines [end - begin, n] -> [count, n]
  void apply(int64_t n, const Byte* in, int64_t stride, Byte* out) const {
    vector<int32_t> sums(n);
    for (size_t i = 0; i < starts.size(); ++i)
      weighted_line(n, counts[i], in + (starts[i] - begin) * stride, stride, &weights[i * room], &sums[0], out + i * n);
  }
};

// Image.resize((to_width, to_height), BICUBIC or else BILINEAR), cut to [bottom - top, right - left, C]
extern "C" void NAME(resize)(int64_t height, int64_t width, int64_t channels, const Byte* in, int64_t to_height,
                              int64_t to_width, const int64_t* window, bool cubic, Byte* out) {
  int64_t left = window[0], top = window[1], columns = window[2] - left;
  Weights across(width, to_width, left, columns, cubic), down(height, to_height, top, window[3] - top, cubic);
  int64_t read = down.end - down.begin, needed = across.end - across.begin, stride = width * channels;
  const int64_t strip = 64;  // rows at a time, which stay in the cache
  vector<Byte> turned(needed * strip * channels), found(columns * strip * channels), lines(read * columns * channels);
  for (int64_t y = 0; y < read; y += strip) {
    int64_t rows = std::min(strip, read - y), n = rows * channels;
    transpose(rows, needed, stride, channels, in + (down.begin + y) * stride + across.begin * channels, &turned[0]);
    across.apply(n, &turned[0], n, &found[0]);
    transpose(columns, rows, n, channels, &found[0], &lines[y * columns * channels]);
  }
  down.apply(columns * channels, &lines[0], columns * channels, out);
}

// One box, ``radius`` and a fraction to either side, over n bytes of each line.
static void box_line(int64_t n, const Byte* off, const Byte* on, const Byte* right, uint32_t whole, uint32_t part,
                     uint32_t* sums, Byte* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    sums[i] += on[i] - off[i];
    out[i] = (sums[i] * whole + (uint32_t)(off[i] + right[i]) * part + (1 << 23)) >> 24;
  }
}

// Three passes over all lines; the last one ends in ``second``.
static void boxes(int64_t lines, int64_t n, float radius, Byte* first, Byte* second) {
  int64_t r = (int64_t)radius;
  uint32_t whole = (uint32_t)((float)(1 << 24) / (radius * 2 + 1));
  uint32_t part = ((1 << 24) - (uint32_t)(r * 2 + 1) * whole) / 2;
  vector<uint32_t> sums(n);
  for (int pass = 0; pass < 3; ++pass, std::swap(first, second)) {
    auto line = [&](int64_t i) { return first + clamped(i, lines) * n; };
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t i = -r - 1; i < r; ++i)
      for (int64_t k = 0; k < n; ++k) sums[k] += line(i)[k];
    for (int64_t i = 0; i < lines; ++i)
      box_line(n, line(i - r - 1), line(i + r), line(i + r + 1), whole, part, &sums[0], second + i * n);
  }
}

// ImageFilter.GaussianBlur(deviation)
extern "C" void NAME(blur)(int64_t height, int64_t width, int64_t channels, const Byte* in, float deviation,
                           Byte* out) {
  float variance = deviation * deviation / 3, length = std::sqrt(12.0 * variance + 1.0);
  float whole = std::floor((length - 1.0) / 2.0);
  float part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance);
  part /= 6 * (variance - (whole + 1) * (whole + 1));
  float radius = whole + part;
  int64_t size = height * width * channels;
  vector<Byte> one(size), other(size);
  transpose(height, width, width * channels, channels, in, &one[0]);
  boxes(width, height * channels, radius, &one[0], &other[0]);
  transpose(width, height, height * channels, channels, &other[0], &one[0]);
  boxes(height, width * channels, radius, &one[0], out);
}

// ------------------------------------------------------------ colours, tables

static void sharpen_row(int64_t n, int64_t step, const Byte* above, const Byte* row, const Byte* below, float factor,
                        Byte* out) {
  const float side = 1.0f / 13, middle = 5.0f / 13;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0.5f;
    sum += (float)below[i - step] * side + (float)below[i] * side + (float)below[i + step] * side;
    sum += (float)row[i - step] * side + (float)row[i] * middle + (float)row[i + step] * side;
    sum += (float)above[i - step] * side + (float)above[i] * side + (float)above[i + step] * side;
    out[i] = blend(byte(sum), row[i], factor);
  }
}

// ImageEnhance.Sharpness(image).enhance(factor)
extern "C" void NAME(sharpen)(int64_t height, int64_t width, int64_t channels, const Byte* in, float factor,
                              Byte* out) {
  int64_t n = width * channels;
  memcpy(out, in, height * n);  // the outermost pixels stay
  for (int64_t y = 1; y + 1 < height && width > 2; ++y) {
    const Byte* row = in + y * n + channels;
    sharpen_row(n - 2 * channels, channels, row - n, row, row + n, factor, out + y * n + channels);
  }
}

INLINE int grey(const Byte* p) { return (p[0] * 19595 + p[1] * 38470 + p[2] * 7471 + 0x8000) >> 16; }

// ImageEnhance.Color(image).enhance(factor), of n pixels [3]
extern "C" void NAME(color)(int64_t n, const Byte* in, float factor, Byte* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    int from = grey(in + 3 * i);
    for (int c = 0; c < 3; ++c) out[3 * i + c] = blend(from, in[3 * i + c], factor);
  }
}

INLINE int larger(int a, int b) { return a > b ? a : b; }
INLINE int smaller(int a, int b) { return a < b ? a : b; }

// The image whose hues are moved by ``shift`` of 256 steps, of n pixels [3], each converted to Pillow's mode HSV and back.
extern "C" void NAME(hue)(int64_t n, const Byte* in, int64_t shift, Byte* out) {
  const int block = 256;
  int32_t x[block] = {}, y[block] = {}, z[block] = {};  // red, green, blue, or hue, saturation, value
  for (int64_t first = 0; first < n; first += block, in += 3 * block, out += 3 * block) {
    int count = std::min<int64_t>(block, n - first), steps = shift;
    for (int i = 0; i < count; ++i) {
      x[i] = in[3 * i];
      y[i] = in[3 * i + 1];
      z[i] = in[3 * i + 2];
    }
#pragma omp simd
    for (int i = 0; i < block; ++i) {
      int r = x[i], g = y[i], b = z[i], most = larger(r, larger(g, b)), range = most - smaller(r, smaller(g, b));
      float divisor = larger(range, 1), red = (float)(most - r) / divisor, green = (float)(most - g) / divisor;
      float blue = (float)(most - b) / divisor;
      float second = (float)(2.0 + red - blue), third = (float)(4.0 + green - red);
      float place = r == most ? blue - green : g == most ? second : third;
      double turn = place / 6.0 + 1.0;
      float share = (float)(turn >= 1.0 ? turn - 1.0 : turn);
      int hue = (int)(share * 255.0);
      x[i] = ((range > 0 ? hue : 0) + steps) & 255;
      y[i] = (int)((float)range / (float)larger(most, 1) * 255.0);
      z[i] = most;
    }
#pragma omp simd
    for (int i = 0; i < block; ++i) {
      int v = z[i];
      double sixths = (float)x[i] * 6.0 / 255.0;
      int k = (int)sixths;
      float part = (float)(sixths - k), s = (float)(y[i] / 255.0);
      int p = (int)(v * (1.0 - s) + 0.5), q = (int)(v * (1.0 - s * part) + 0.5);
      int t = (int)(v * (1.0 - s * (1.0 - part)) + 0.5);
      k = k == 6 ? 0 : k;
      x[i] = (k == 0) | (k == 5) ? v : k == 1 ? q : k == 4 ? t : p;
      y[i] = (k == 1) | (k == 2) ? v : k == 0 ? t : k == 3 ? q : p;
      z[i] = (k == 3) | (k == 4) ? v : k == 2 ? t : k == 5 ? q : p;
    }
    for (int i = 0; i < count; ++i) {
      out[3 * i] = x[i];
      out[3 * i + 1] = y[i];
      out[3 * i + 2] = z[i];
    }
  }
}

// The sum of what the pixels are in grey.
extern "C" void NAME(sum_of_greys)(int64_t n, int64_t channels, const Byte* in, int64_t* found) {
  int64_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += channels == 3 ? grey(in + 3 * i) : in[i];
  *found = sum;
}

// Image.blend(from, to, share), of n values
extern "C" void NAME(blend)(int64_t n, const Byte* from, const Byte* to, float share, Byte* out) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = blend(from[i], to[i], share);
}

INLINE void count(int64_t n, int64_t channels, const Byte* in, int64_t* found) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < channels; ++c) ++found[256 * c + in[i * channels + c]];
}

// How often each value is there, [C, 256], of n pixels
extern "C" void NAME(histogram)(int64_t n, int64_t channels, const Byte* in, int64_t* found) {
  channels == 3 ? count(n, 3, in, found) : count(n, 1, in, found);
}

INLINE void map(int64_t n, int64_t channels, const Byte* in, const Byte* __restrict tables, Byte* __restrict out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t c = 0; c < channels; ++c) out[i * channels + c] = tables[256 * c + in[i * channels + c]];
}

// Image.point(tables [C, 256]), of n pixels
extern "C" void NAME(map)(int64_t n, int64_t channels, const Byte* in, const Byte* tables, Byte* out) {
  channels == 3 ? map(n, 3, in, tables, out) : map(n, 1, in, tables, out);
}

// The mirror image, left for right, of three channels.
extern "C" void NAME(mirror)(int64_t height, int64_t width, const Byte* in, Byte* out) {
  for (int64_t y = 0; y < height; ++y, in += 3 * width)
    for (int64_t x = width - 1; x >= 0; --x, out += 3) memcpy(out, in + 3 * x, 3);
}
