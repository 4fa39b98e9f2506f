// Which integer multipliers this CPU and operating system offer, and which of them to use.
#include <cpuid.h>

#include <cstdlib>
#include <stdexcept>

#include "kernels/integer_kernels.h"
#include "kernels/os_states.h"

namespace duck {
namespace {

bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvxVnni = 1u << 4;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvxVnni);
}

bool has_amx_int8() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxInt8 = 1u << 25;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxInt8) && may_use_tiles();
}

// AMX where it is faster, AVX512-VNNI for what it leaves.
IntegerTable amx_table() {
  IntegerTable table = avx512_vnni::kIntegerTable;
  table.name = "amx_int8";
  table.tiles = &amx_int8::kTiles;
  return table;
}

// What goes with an ISA, from the slowest to the best. A CPU with AVX-512 but without its VNNI computes with
// AVX2. Nothing but tests asks for avx512_vnni_256.
std::vector<const IntegerTable*> available_tables(Isa isa) {
  if (isa == Isa::kScalar) return {&scalar::kIntegerTable};
  std::vector<const IntegerTable*> tables = {&avx2::kIntegerTable};
  static const bool vnni_256 = has_avx_vnni();
  static const bool vnni_512 = isa_available(Isa::kAvx512) && __builtin_cpu_supports("avx512vnni");
  if (vnni_256) tables.push_back(&avx_vnni::kIntegerTable);
  if (isa == Isa::kAvx512 && vnni_512) {
    tables.push_back(&avx512_vnni::kIntegerTable256);
    tables.push_back(&avx512_vnni::kIntegerTable);
    static const IntegerTable amx = amx_table();
    static const bool has_amx = has_amx_int8();
    if (has_amx) tables.push_back(&amx);
  }
  return tables;
}

}  // namespace

std::vector<std::string> available_integer(Isa isa) {
  std::vector<std::string> names;
  for (const IntegerTable* table : available_tables(isa)) names.emplace_back(table->name);
  return names;
}

const IntegerTable& select_integer(Isa isa) {
  const auto tables = available_tables(isa);
  const char* forced = std::getenv("DUCK_FORCE_INTEGER");
  if (forced == nullptr || *forced == '\0') return *tables.back();
  std::string names;
  for (const IntegerTable* each : tables) {
    if (forced == std::string(each->name)) return *each;
    names += (names.empty() ? "" : ", ") + std::string(each->name);
  }
  throw std::invalid_argument(std::string("DUCK_FORCE_INTEGER: got '") + forced + "', expected one of " +
                              names + " with the instruction set " + isa_name(isa));
}

}  // namespace duck
