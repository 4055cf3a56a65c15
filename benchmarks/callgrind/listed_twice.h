// The masks as they are, read twice: what this adds is all that finding the live cells takes, block tables included.
#pragma once

namespace vtoken {

inline void list_live(const AttendArgs& args, int32_t slice, int32_t begin, int32_t end, int64_t hidden,
                      LiveCells& live) {
  const int32_t count = live.count;
  masked_list_live(args, slice, begin, end, hidden, live);
  asm volatile("" ::: "memory");  // else the compiler might notice
  live.count = count;
  masked_list_live(args, slice, begin, end, hidden, live);
}

inline bool any_live(const AttendArgs& args, int32_t slice, int32_t begin, int32_t end) {
  const bool once = masked_any_live(args, slice, begin, end);
  asm volatile("" ::: "memory");
  return once | masked_any_live(args, slice, begin, end);
}

}  // namespace vtoken
