// Make a recorded sequence of kernel calls again, without the way through Python between them.
#include <cstdint>

extern "C" {

struct Call {
  int64_t (*function)(void* args);  // every kernel that can be recorded has this form; 0 = done
  void* args;
};

// What the first call that was not done returned, or 0.
int64_t vtoken_replay(const Call* calls, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (const int64_t failed = calls[i].function(calls[i].args)) return failed;
  return 0;
}
}
