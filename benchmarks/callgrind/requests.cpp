// Valgrind's client requests as functions, for ctypes. Outside valgrind they do nothing.
#include <valgrind/callgrind.h>

extern "C" void start_counting() {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}
extern "C" void stop_counting() { CALLGRIND_STOP_INSTRUMENTATION; }
// Writes what was counted since the last dump.
extern "C" void dump(const char* name) { CALLGRIND_DUMP_STATS_AT(name); }
