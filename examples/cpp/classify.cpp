// Classifies images with an export for OpenVINO, without Python. README.md says how to build it.
//
//     classify EXPORT [-top N] [-threads N] IMAGE ...
//
// It prints a row for each class: name,rank,output,class,probability,logit. Pixels are decoded and
// resized by Pillow's arithmetic, and OpenVINO computes as inference/backends.py asks for it. So the
// logits are, bit for bit, those of open_export for an image that is computed alone.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <numeric>
#include <openvino/openvino.hpp>
#include <regex>
#include <sstream>

#include "images.h"

using std::string;

string text_of(const string& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error(file + " can't be read");
  return string(std::istreambuf_iterator<char>(stream), {});
}

// A field of CSV: in quotes where it has to be.
string field(const string& text) {
  if (text.find_first_of(",\"\r\n") == string::npos) return text;
  return '"' + std::regex_replace(text, std::regex("\""), "\"\"") + '"';
}

int count_of(const string& word) {
  if (word.empty() || word.size() > 6 || word.find_first_not_of("0123456789") != string::npos || std::stoi(word) < 1)
    throw std::runtime_error("found " + word + ", expected a number from 1 to 999999");
  return std::stoi(word);
}

string trimmed(const string& text) { return std::regex_replace(text, std::regex("^ +| +$"), ""); }

// Values of preprocess.json. Each key begins a line, which no text within the file does.
struct Manifest {
  string text;

  string word(const string& key) const {
    std::smatch found;
    const std::regex entry("\n +\"" + key + "\": (\\[[^\\]]*\\]|\"[^\"]*\"|[^,\n]*)");
    if (!std::regex_search(text, found, entry)) throw std::runtime_error("preprocess.json has no " + key);
    return std::regex_replace(found[1].str(), std::regex("[\"\\[\\],\\s]+"), " ");
  }
  std::vector<double> numbers(const string& key) const {
    std::istringstream stream(word(key));
    return {std::istream_iterator<double>(stream), {}};
  }
  bool is(const string& key, const string& value) const {
    std::istringstream stream(word(key));
    string first;
    return stream >> first && first == value;
  }
  void expect(const string& key, const std::vector<string>& values) const {
    for (const string& value : values)
      if (is(key, value)) return;
    throw std::runtime_error(key + " is " + trimmed(word(key)) + ", expected " + values[0] + "; use tools/predict.py");
  }
};

// What the export says of its images, and the model.
struct Classifier {
  int height, width, channels, resized_height, resized_width;
  bool squash, bicubic, sigmoid;
  std::vector<float> scale, shift;
  std::vector<string> classes;
  ov::CompiledModel model;

  Classifier(const string& folder, int threads) {
    const Manifest manifest{text_of(folder + "/preprocess.json")};
    manifest.expect("format", {"openvino"});
    manifest.expect("task", {"classification", "multilabel"});
    manifest.expect("crop_mode", {"center", "squash"});
    manifest.expect("interpolation", {"bicubic", "bilinear"});
    manifest.expect("channels", {"3", "1"});
    manifest.expect("features", {"false"});
    for (const string key : {"EXIF_ORIENTATION", "FAST_EVAL"}) manifest.expect("DATA." + key, {"false"});
    const auto size = manifest.numbers("image_size");
    const double share = manifest.numbers("crop_pct").at(0);
    height = size.at(0), width = size.back(), channels = manifest.numbers("channels").at(0);
    resized_height = std::floor(height / share), resized_width = std::floor(width / share);
    squash = manifest.is("crop_mode", "squash"), bicubic = manifest.is("interpolation", "bicubic");
    sigmoid = manifest.is("task", "multilabel");
    const auto mean = manifest.numbers("mean"), deviation = manifest.numbers("std");
    for (int c = 0; c < channels; ++c) {
      const double divisor = deviation.at(deviation.size() == 1 ? 0 : c);
      scale.push_back(1 / (255 * divisor));
      shift.push_back(-mean.at(mean.size() == 1 ? 0 : c) / divisor);
    }
    std::istringstream labels(text_of(folder + "/labels.txt"));
    for (string line; std::getline(labels, line);) classes.push_back(line);
    ov::Core core;
    model = core.compile_model(folder + "/model.xml", "CPU",
                               ov::hint::inference_precision(manifest.is("precision", "bfloat16") ? ov::element::bf16
                                                                                                  : ov::element::f32),
                               ov::hint::performance_mode(ov::hint::PerformanceMode::LATENCY),
                               ov::inference_num_threads(threads), ov::hint::dynamic_quantization_group_size(0));
  }

  // The pixels that the model sees: resized until they cover its size, or to it, and cropped.
  Image prepared(Image image) const {
    image = with_channels(image, channels);
    int64_t h = resized_height, w = resized_width;
    if (!squash && h == w) {
      const int64_t side = std::min(image.height, image.width);
      h = h * image.height / side, w = w * image.width / side;
    } else if (!squash) {
      const double ratio = std::min(image.height / double(h), image.width / double(w));
      h = std::nearbyint(image.height / ratio), w = std::nearbyint(image.width / ratio);
    }
    return crop(resize(image, h, w, bicubic), height, width);
  }

  std::vector<float> logits(const Image& image) {
    const Image pixels = prepared(image);
    ov::Tensor input(ov::element::f32, ov::Shape{1, size_t(channels), size_t(height), size_t(width)});
    for (int c = 0; c < channels; ++c)
      for (int i = 0; i < height * width; ++i) {
        const float product = float(pixels.data[i * channels + c]) * scale[c];
        input.data<float>()[c * height * width + i] = product + shift[c];
      }
    ov::InferRequest request = model.create_infer_request();
    request.set_input_tensor(input);
    request.infer();
    const ov::Tensor output = request.get_output_tensor();
    return {output.data<float>(), output.data<float>() + output.get_size()};
  }

  std::vector<double> probabilities(const std::vector<float>& logits) const {
    std::vector<double> found(logits.begin(), logits.end());
    const double most = *std::max_element(found.begin(), found.end());
    for (double& value : found) value = sigmoid ? 1 / (1 + std::exp(-value)) : std::exp(value - most);
    const double sum = sigmoid ? 1 : std::accumulate(found.begin(), found.end(), 0.0);
    for (double& value : found) value /= sum;
    return found;
  }
};

int main(int count, char** words) try {
  std::vector<string> paths;
  int top = 5, threads = 1;
  for (int i = 1; i < count; ++i) {
    const string word = words[i];
    const bool is_number = (word == "-top" || word == "-threads") && i + 1 < count;
    if (!is_number)
      paths.push_back(word);
    else
      (word == "-top" ? top : threads) = count_of(words[++i]);
  }
  if (paths.size() < 2) throw std::runtime_error("expected EXPORT [-top N] [-threads N] IMAGE ...");
  Classifier classifier(paths[0], threads);
  std::puts("name,rank,output,class,probability,logit");
  for (size_t number = 1; number < paths.size(); ++number) {
    const auto logits = classifier.logits(read_image(paths[number]));
    const auto probabilities = classifier.probabilities(logits);
    std::vector<size_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    // Of equal probabilities the lowest class comes first.
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return probabilities[a] > probabilities[b]; });
    for (size_t rank = 0; rank < order.size() && rank < size_t(top); ++rank) {
      const size_t output = order[rank];
      const string name = output < classifier.classes.size() ? classifier.classes[output] : std::to_string(output);
      // 9 digits tell a float32 from all others, and 17 a double.
      std::printf("%s,%zu,%zu,%s,%.17g,%.9g\n", field(paths[number]).c_str(), rank + 1, output,
                  field(name).c_str(), probabilities[output], logits[output]);
    }
  }
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 2;
}
