/* What a profiler is to NVTX: a library that NVTX loads into the process (NVTX_INJECTION64_PATH) and that
   takes over its functions. This one writes every range to the file that NVTX_LOG names. The layouts
   are those of NVTX 3's nvtxTypes.h and nvtxDetail: event attributes version 2, module CORE2. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef struct {
    size_t struct_size;
    int (*get_module_function_table)(int module, Function ***table, unsigned *size);
} Callbacks;
typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message; /* also of a registered one: its handle is the text */
} Attributes;

enum { CALLBACKS = 1, CORE2 = 5 };
enum { RANGE_START = 2, RANGE_END = 3, RANGE_PUSH = 4, RANGE_POP = 5, REGISTER_STRING = 10, DOMAIN_CREATE = 12 };

static uint64_t started;
static int depth;

static void note(const char *what, const void *domain, uint64_t id, const char *message) {
    FILE *log = fopen(getenv("NVTX_LOG"), "a");
    fprintf(log, "%s %s %lu %s\n", what, domain ? (const char *)domain : "-", (unsigned long)id, message);
    fclose(log);
}
static void *keep(const char *text) { return strdup(text); }
static void *domain_create(const char *name) { return keep(name); }
static void *register_string(void *domain, const char *text) { return keep(text); }
static uint64_t range_start(void *domain, const Attributes *attributes) {
    note("start", domain, ++started, attributes->message);
    return started;
}
static void range_end(void *domain, uint64_t id) { note("end", domain, id, ""); }
static int range_push(void *domain, const Attributes *attributes) {
    note("push", domain, ++depth, attributes->message);
    return depth;
}
static int range_pop(void *domain) {
    note("pop", domain, depth, "");
    return --depth;
}

int InitializeInjectionNvtx2(const void *(*get_export_table)(uint32_t)) {
    const Callbacks *callbacks = get_export_table(CALLBACKS);
    Function **table = 0;
    unsigned size = 0;
    if (!callbacks || !callbacks->get_module_function_table(CORE2, &table, &size) || size <= DOMAIN_CREATE)
        return 0;
    *table[RANGE_START] = (Function)range_start;
    *table[RANGE_END] = (Function)range_end;
    *table[RANGE_PUSH] = (Function)range_push;
    *table[RANGE_POP] = (Function)range_pop;
    *table[REGISTER_STRING] = (Function)register_string;
    *table[DOMAIN_CREATE] = (Function)domain_create;
    return 1;
}
