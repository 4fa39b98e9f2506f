// Which bf16 multipliers this CPU and operating system offer, and which of them to use.
#include <cpuid.h>

#include <cstdlib>
#include <stdexcept>

#include "kernels/amx_bf16/kernels.h"
#include "kernels/bf16_tiles.h"
#include "kernels/os_states.h"

namespace duck {
namespace {

bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAvx512Bf16 = 1u << 5;
  return isa_available(Isa::kAvx512) && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) &&
         (eax & kAvx512Bf16);
}

bool has_amx_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22;
  return has_avx512_bf16() && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxBf16) &&
         may_use_tiles();
}

Bf16Tiles amx_tiles() {
  Bf16Tiles tiles = avx512_bf16::kTiles;
  tiles.name = "amx_bf16";
  tiles.begin = &amx_bf16::begin;
  tiles.end = &amx_bf16::end;
  tiles.multiply = &amx_bf16::multiply;
  return tiles;
}

std::vector<const Bf16Tiles*> available_tiles() {
  std::vector<const Bf16Tiles*> tiles;
  if (has_avx512_bf16()) tiles.push_back(&avx512_bf16::kTiles);
  static const Bf16Tiles amx = amx_tiles();
  static const bool has_amx = has_amx_bf16();  // asked once, before a thread uses tiles
  if (has_amx) tiles.push_back(&amx);
  return tiles;
}

}  // namespace

std::vector<std::string> available_bf16() {
  std::vector<std::string> names;
  for (const Bf16Tiles* tiles : available_tiles()) names.emplace_back(tiles->name);
  return names;
}

const Bf16Tiles& select_bf16(Isa isa) {
  const auto tiles = available_tiles();
  if (tiles.empty()) {
    throw std::invalid_argument(
        "prefill: got 'bf16', expected 'f32', as this CPU has neither AVX512-BF16 nor AMX-BF16");
  }
  if (isa != Isa::kAvx512) {
    throw std::invalid_argument(std::string("prefill: got 'bf16', expected 'f32' with the instruction set ") +
                                isa_name(isa) + ", as bf16 needs avx512");
  }
  const char* forced = std::getenv("DUCK_FORCE_BF16");
  if (forced == nullptr || *forced == '\0') return *tiles.back();
  std::string names;
  for (const Bf16Tiles* each : tiles) {
    if (forced == std::string(each->name)) return *each;
    names += (names.empty() ? "" : ", ") + std::string(each->name);
  }
  throw std::invalid_argument(std::string("DUCK_FORCE_BF16: got '") + forced + "', expected one of " + names);
}

}  // namespace duck
