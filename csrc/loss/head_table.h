// The heads of a loss as the kernels read them, from the record that record_of() in gradscale_ext/heads.py makes.
#pragma once

#include "kind_of_head.h"

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
    return description_of(heads_[head].kind).forms;
  }
  bool has_target(size_t head) const {
    return forms(head)[0].target_dims >= 0;
  }
  size_t index_of(const Head* head) const {
    return head - heads_.data();
  }

 private:
  std::vector<Head> heads_;
  std::vector<OwnedSupport> supports_;
};

} // namespace gradscale
