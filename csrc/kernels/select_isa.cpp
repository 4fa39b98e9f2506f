// Which kernels this CPU and operating system can run, and which of them to use.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/kernel_table.h"
#include "kernels/os_states.h"

namespace duck {
namespace {

// The register states that the OS saves on a task switch; 0 when it offers no XSAVE. The OS (or a hypervisor)
// can leave registers off that the CPU's flags promise.
uint64_t os_saved_states() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_OSXSAVE)) return 0;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool read_is_amd() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_AMD_ebx;
}

unsigned cpu_family() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
  const unsigned family = (eax >> 8) & 15;
  return family == 15 ? family + ((eax >> 20) & 255) : family;
}

// Asked once: in a virtual machine CPUID takes ten microseconds.
bool is_amd() {
  static const bool answer = read_is_amd();
  return answer;
}

bool has_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxTile = 1u << 24;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kAmxTile);
}

bool ask_for_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

std::string available_names() {
  std::string names;
  for (Isa isa : available_isas()) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  return names;
}

}  // namespace

bool os_saves(uint64_t states) { return (os_saved_states() & states) == states; }

bool may_use_tiles() {
  static const bool answer = has_tiles() && os_saves(kXcr0Tiles) && ask_for_tiles();
  return answer;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool isa_available(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return os_saves(kXcr0Avx) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return os_saves(kXcr0Avx512) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
  }
  return false;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (isa_available(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa parse_isa(const std::string& field, const std::string& name) {
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (name != isa_name(isa)) continue;
    if (isa_available(isa)) return isa;
    throw std::invalid_argument(field + ": got '" + name +
                                "', which this machine cannot run, expected one of " + available_names());
  }
  throw std::invalid_argument(field + ": got '" + name + "', expected one of " + available_names());
}

Isa select_isa() {
  const char* forced = std::getenv("DUCK_FORCE_ISA");
  if (forced != nullptr && *forced != '\0') return parse_isa("DUCK_FORCE_ISA", forced);
  return available_isas().back();
}

bool denormals_are_fast() { return is_amd(); }

WeightFormat kernel_format(WeightFormat stored) {
  return stored == WeightFormat::kFp8 && !denormals_are_fast() ? WeightFormat::kFp8Normal : stored;
}

const bool kPrefetchesFurtherOut = is_amd() ? cpu_family() == 25 : isa_available(Isa::kAvx512);

uint32_t prefetch_bytes() { return is_amd() ? 8192 : 4096; }

const KernelTable& kernel_table(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return avx2::kTable;
    case Isa::kAvx512:
      return avx512::kTable;
    case Isa::kScalar:
      break;
  }
  return scalar::kTable;
}

}  // namespace duck
