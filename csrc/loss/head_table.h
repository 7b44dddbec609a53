// The heads of a loss as the kernels read them, from the record that record_of() in gradscale_ext/heads.py makes.
#pragma once

#include "segment.h"

#include <c10/util/ArrayRef.h>

#include <memory>
#include <string>
#include <vector>

namespace gradscale {

// A support with the memory of its raw centres.
class OwnedSupport {
 public:
  explicit OwnedSupport(Support support);
  // The numbers of a support by their names.
  OwnedSupport(c10::ArrayRef<std::string> names, c10::ArrayRef<double> numbers);

  const Support& get() const {
    return support_;
  }

 private:
  Support support_;
  std::unique_ptr<double[]> centers_;
  std::unique_ptr<float[]> centers_float_;
};

// Dimensions behind the batch that a prediction and its target may have; a class is an int64 index.
struct Form {
  int32_t prediction_dims;
  int32_t target_dims; // -1: no target
  bool classes;
};

class HeadTable {
 public:
  HeadTable(c10::ArrayRef<std::string> names, c10::ArrayRef<double> numbers);

  size_t size() const {
    return heads_.size();
  }
  const Head& operator[](size_t head) const {
    return heads_[head];
  }
  const std::vector<Form>& forms(size_t head) const {
    return forms_[head];
  }
  bool has_target(size_t head) const {
    return forms_[head][0].target_dims >= 0;
  }
  size_t index_of(const Head* head) const {
    return head - heads_.data();
  }

 private:
  std::vector<Head> heads_;
  std::vector<std::vector<Form>> forms_;
  std::vector<OwnedSupport> supports_;
};

// Names of the kinds of heads.
std::vector<std::string> kinds();

} // namespace gradscale
