// How C++ names what kernels are compiled for, inside of namespace gradscale.
#pragma once

#include "segment.h"

namespace gradscale {

inline const char* name_of(Kind kind) {
  switch (kind) {
#define GRADSCALE_CASE(name, ...) \
  case Kind::name:                \
    return "Kind::" #name;
    GRADSCALE_KINDS(GRADSCALE_CASE)
#undef GRADSCALE_CASE
  }
  return "";
}

inline const char* name_of_gradient(Element element) {
  return element == Element::int64 ? "void" : type_name(element); // none is wanted
}

inline const char* name_of(Transform transform) {
  switch (transform) {
    case Transform::identity:
      return "Transform::identity";
    case Transform::signed_hyperbolic:
      return "Transform::signed_hyperbolic";
    case Transform::symlog:
      return "Transform::symlog";
  }
  return "";
}

} // namespace gradscale
