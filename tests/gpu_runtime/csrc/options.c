// What the environment says: the card and its limits, the schedule, whether kernels run.
#include "stand_in.h"

// Names, capabilities, cores, shared memory, caches and clocks as memplan/hardware/catalog.py has them (its sources: XLA's target
// descriptions and NVIDIA's data sheets); clocks of memory and widths of buses give the bandwidths there.
static const Card cards[] = {
    {"v100", "Stand-in for Tesla V100-SXM2-16GB", 7, 0, 80, 98304, 98304, 6291456, 1530000, 877000, 4096, 16935682048},
    {"a100", "Stand-in for NVIDIA A100-SXM4-80GB", 8, 0, 108, 166912, 167936, 41943040, 1410000, 1593000, 5120, 84987740160},
    {"h100", "Stand-in for NVIDIA H100 80GB HBM3", 9, 0, 132, 232448, 233472, 52428800, 1980000, 2619000, 5120, 84978434048},
};

static const char* text_of(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

static size_t mebibytes_of(const char* name, size_t otherwise) {
  const char* value = getenv(name);
  return value && *value ? (size_t)strtoull(value, NULL, 10) << 20 : otherwise;
}

static const Card* card_of(const char* key) {
  for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
    if (!strcmp(key, cards[i].key)) return &cards[i];
  fprintf(stderr, "stand-in: STAND_IN_CARD=%s is none of v100, a100, h100\n", key);
  exit(70);
}

static Schedule schedule_of(const char* name) {
  static const char* const names[] = {[EAGER] = "eager", [LATE] = "late", [EARLY] = "early", [RANDOM] = "random"};
  for (int i = EAGER; i <= RANDOM; i++)
    if (!strcmp(name, names[i])) return (Schedule)i;
  fprintf(stderr, "stand-in: STAND_IN_SCHEDULE=%s is none of eager, late, early, random\n", name);
  exit(70);
}

static Options chosen;

static void read_environment(void) {
  chosen.card = card_of(text_of("STAND_IN_CARD", "v100"));
  chosen.device_bytes = mebibytes_of("STAND_IN_DEVICE_MIB", chosen.card->memory_bytes);
  chosen.host_bytes = mebibytes_of("STAND_IN_HOST_MIB", (size_t)1 << 40);
  chosen.schedule_name = text_of("STAND_IN_SCHEDULE", "eager");
  chosen.schedule = schedule_of(chosen.schedule_name);
  chosen.seed = strtoull(text_of("STAND_IN_SEED", "0"), NULL, 10);
  chosen.execute = strcmp(text_of("STAND_IN_EXECUTE", "1"), "0") != 0;
}

const Options* options(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_environment);
  return &chosen;
}

// Another schedule for what is submitted from now on: called by programs on the stand-in, when nothing is under way.
EXPORT void stand_in_follow(const char* schedule, uint64_t seed) {
  options();
  chosen.schedule = schedule_of(schedule);
  chosen.seed = seed;
  log_line("SCHEDULE %s seed=%lu", schedule, seed);
}
