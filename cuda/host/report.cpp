// report.cpp    saying what went wrong: kernel, block, thread, place, deed
#include "machine.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>

namespace emu {

static std::string format_text(const char* format, va_list arguments) {
    char buffer[512];
    vsnprintf(buffer, sizeof buffer, format, arguments);
    return buffer;
}

std::string text(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::string s = format_text(format, arguments);
    va_end(arguments);
    return s;
}
std::string text(dim3 d) { return text("(%u, %u, %u)", d.x, d.y, d.z); }
std::string text(Site site) {
    const char* name = strrchr(site.file, '/');
    return text("%s:%d", name ? name + 1 : site.file, site.line);
}

void record(const Thread* thread, const Place& place, const std::string& what) {
    Machine& m = *machine;
    if (m.failed) return;
    m.failed = true;
    m.error = text("kernel %s, block %s", m.kernel->name, text(m.block).c_str());
    if (thread) m.error += text(", thread %s", text(thread->index).c_str());
    if (place.site.file) m.error += ", at " + text(place.site);
    m.error += ": " + what;
    m.error_code = place.code;
}

void fail(const Place& place, const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    record(self, place, format_text(format, arguments));
    va_end(arguments);
    // The fiber is never resumed: whatever it was about to do does not happen.
    void* abandoned;
    switch_stack(&abandoned, machine->scheduler_stack_pointer);
    __builtin_unreachable();
}

// file:line of an instruction if binutils are there to ask, the program and its offset otherwise.
static std::string look_up(const void* code) {
    Dl_info info;
    if (!dladdr(code, &info) || !info.dli_fname) return "";
    size_t offset = (size_t)((const char*)code - (const char*)info.dli_fbase) - 1; // within the call
    char line[512] = "";
    std::string command = text("addr2line -e '%s' 0x%zx 2>/dev/null", info.dli_fname, offset);
    if (FILE* pipe = popen(command.c_str(), "r")) {
        if (!fgets(line, sizeof line, pipe)) line[0] = 0;
        pclose(pipe);
    }
    line[strcspn(line, "\n(")] = 0;
    const char* name = strrchr(line, '/');
    return line[0] && line[0] != '?' ? text(" (%s)", name ? name + 1 : line) : text(" (%s+0x%zx)", info.dli_fname, offset);
}

void resolve_error() {
    Machine& m = *machine;
    if (!m.failed || !m.error_code) return;
    // Reading a large program's debug information takes a second: once an instruction.
    static std::mutex mutex;
    static std::map<const void*, std::string>* known = new std::map<const void*, std::string>;
    std::lock_guard<std::mutex> guard(mutex);
    auto [place, is_new] = known->emplace(m.error_code, "");
    if (is_new) place->second = look_up(m.error_code);
    m.error += place->second;
}

} // namespace emu
