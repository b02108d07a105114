"""Draws ``street.png``, the picture that the demo encodes: ``python examples/draw_street.py``.

640 is a multiple of the encoder's 32-pixel blocks and 440 is not, so the 640 x 440 picture
is resized on its way in. The same pixels come out on every run.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw

Colour = tuple[int, int, int]

WIDTH, HEIGHT = 640, 440
HORIZON, KERB = 322, 352

SKY_TOP, SKY_LOW = (92, 148, 210), (252, 220, 184)
SUN, CLOUD = (255, 240, 196), (255, 247, 240)
FAR_HILL, NEAR_HILL = (158, 176, 200), (122, 150, 164)
PAVEMENT, JOINT, KERBSTONE = (192, 184, 176), (178, 170, 162), (218, 212, 204)
ROAD, MARKING, SHADOW = (84, 86, 96), (240, 232, 210), (66, 68, 78)
TRUNK, LEAVES = (104, 76, 58), ((66, 116, 80), (84, 138, 90), (108, 162, 104))
FRAME, GLASS, LIT, DOOR = (246, 240, 230), (112, 146, 174), (255, 222, 140), (74, 58, 60)
METAL, GLOW, SKIN = (62, 66, 74), (255, 236, 180), (222, 172, 138)

# left, right, top, wall, roof, windows across, floors above the ground floor, door
HOUSES: tuple[tuple[int, int, int, Colour, Colour, int, int, bool], ...] = (
    (0, 98, 150, (198, 112, 92), (126, 66, 60), 3, 2, True),
    (98, 200, 196, (234, 200, 142), (152, 98, 72), 3, 2, False),
    (200, 288, 128, (134, 158, 174), (82, 98, 116), 3, 3, True),
    (288, 404, 206, (224, 228, 216), (164, 86, 72), 4, 1, True),
    (404, 486, 160, (170, 132, 154), (102, 78, 102), 2, 2, False),
    (486, 640, 186, (216, 152, 112), (132, 78, 64), 5, 2, True),
)


def draw_street() -> Image.Image:
    """The picture, RGB."""
    image = Image.new("RGB", (WIDTH, HEIGHT))
    draw = ImageDraw.Draw(image)
    _sky(draw)
    for number, house in enumerate(HOUSES):
        _house(draw, number, *house)
    _ground(draw)
    for x, size in ((98, 20), (288, 17), (452, 19), (606, 22)):
        _tree(draw, x, size)
    for x in (188, 372, 536):
        _lamp(draw, x)
    _car(draw, 60, 378, (200, 70, 64))
    _car(draw, 424, 390, (60, 108, 162))
    _cyclist(draw, 300, 396)
    return image


def _disc(draw: ImageDraw.ImageDraw, x: int, y: int, radius: int, colour: Colour) -> None:
    draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)


def _sky(draw: ImageDraw.ImageDraw) -> None:
    for y in range(HORIZON):
        red, green, blue = (
            (top * (HORIZON - y) + low * y) // HORIZON for top, low in zip(SKY_TOP, SKY_LOW, strict=True)
        )
        draw.rectangle((0, y, WIDTH, y), fill=(red, green, blue))
    _disc(draw, 540, 66, 27, SUN)
    for x, y, size in ((86, 72, 10), (330, 58, 13), (446, 108, 7)):
        for dx, dy, radius in ((-2, 0, 1), (0, -1, 2), (2, 0, 1), (3, 0, 1)):
            _disc(draw, x + dx * size, y + dy * size // 2, radius * size, CLOUD)
        draw.rectangle((x - 3 * size, y, x + 4 * size, y + size), fill=CLOUD)
    for x, top, radius, colour in (
        (130, 138, 300, FAR_HILL),
        (420, 128, 320, FAR_HILL),
        (300, 176, 260, NEAR_HILL),
        (600, 150, 300, NEAR_HILL),
    ):
        _disc(draw, x, top + radius, radius, colour)


def _house(
    draw: ImageDraw.ImageDraw,
    number: int,
    left: int,
    right: int,
    top: int,
    wall: Colour,
    roof: Colour,
    across: int,
    floors: int,
    door: bool,
) -> None:
    draw.rectangle((left, top, right - 1, HORIZON), fill=wall)
    for step in range(14):
        draw.rectangle((left + step - 3, top - step, right + 2 - step, top - step), fill=roof)
    draw.rectangle((right - 26, top - 28, right - 16, top - 12), fill=roof)
    width, height = 14, 22
    rise = (HORIZON - 56 - top) // floors
    for floor in range(floors):
        for column in range(across):
            x = left + (right - left) * (2 * column + 1) // (2 * across)
            y = top + 12 + floor * rise
            lit = (number + 3 * floor + 2 * column) % 5 == 0
            box = (x - width // 2, y, x + width // 2, y + height)
            draw.rectangle((box[0] - 2, box[1] - 2, box[2] + 2, box[3] + 2), fill=FRAME)
            draw.rectangle(box, fill=LIT if lit else GLASS)
            draw.rectangle((x, y, x, y + height), fill=FRAME)
            draw.rectangle((box[0], y + 9, box[2], y + 9), fill=FRAME)
    if door:
        x = left + (right - left) // 4
        draw.rectangle((x - 11, HORIZON - 42, x + 11, HORIZON), fill=FRAME)
        draw.rectangle((x - 8, HORIZON - 38, x + 8, HORIZON), fill=DOOR)
        _disc(draw, x + 5, HORIZON - 18, 1, LIT)
    shop = (left + (right - left) // 2, HORIZON - 42, right - 12, HORIZON - 8)
    if not door:
        shop = (left + 12, HORIZON - 42, right - 12, HORIZON - 8)
    draw.rectangle((shop[0] - 2, shop[1] - 2, shop[2] + 2, shop[3] + 2), fill=FRAME)
    draw.rectangle(shop, fill=GLASS)
    for stripe, x in enumerate(range(shop[0] - 4, shop[2], 8)):
        colour = FRAME if stripe % 2 else roof
        draw.rectangle((x, shop[1] - 6, min(x + 7, shop[2] + 4), shop[1] + 4), fill=colour)


def _ground(draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((0, HORIZON, WIDTH, KERB), fill=PAVEMENT)
    for x in range(0, WIDTH, 40):
        draw.rectangle((x, HORIZON, x, KERB), fill=JOINT)
    draw.rectangle((0, HORIZON + 14, WIDTH, HORIZON + 14), fill=JOINT)
    draw.rectangle((0, KERB - 4, WIDTH, KERB), fill=KERBSTONE)
    draw.rectangle((0, KERB + 1, WIDTH, HEIGHT), fill=ROAD)
    for x in range(-16, WIDTH, 64):
        draw.rectangle((x, 420, x + 34, 424), fill=MARKING)


def _tree(draw: ImageDraw.ImageDraw, x: int, size: int) -> None:
    draw.rectangle((x - 4, HORIZON - 2 * size, x + 4, HORIZON + 12), fill=TRUNK)
    for (dx, dy, radius), leaves in zip(((0, 0, 9), (-3, -3, 7), (2, -6, 5)), LEAVES, strict=True):
        centre = x + dx * size // 8, HORIZON - 3 * size + dy * size // 8
        _disc(draw, *centre, radius * size // 7, leaves)


def _lamp(draw: ImageDraw.ImageDraw, x: int) -> None:
    draw.rectangle((x - 1, 248, x + 1, KERB - 8), fill=METAL)
    draw.rectangle((x - 4, KERB - 14, x + 4, KERB - 8), fill=METAL)
    draw.rectangle((x - 9, 246, x + 9, 248), fill=METAL)
    for side in (-9, 9):
        _disc(draw, x + side, 254, 5, GLOW)


def _car(draw: ImageDraw.ImageDraw, x: int, y: int, colour: Colour) -> None:
    draw.ellipse((x - 4, y + 30, x + 132, y + 44), fill=SHADOW)
    draw.rounded_rectangle((x + 24, y - 22, x + 100, y + 16), 16, fill=colour)
    draw.rounded_rectangle((x, y, x + 128, y + 32), 12, fill=colour)
    draw.rounded_rectangle((x + 32, y - 16, x + 60, y + 2), 6, fill=GLASS)
    draw.rounded_rectangle((x + 65, y - 16, x + 92, y + 2), 6, fill=GLASS)
    draw.rectangle((x + 62, y + 2, x + 62, y + 28), fill=SHADOW)
    draw.rectangle((x + 122, y + 10, x + 128, y + 16), fill=GLOW)
    for wheel in (x + 28, x + 98):
        _disc(draw, wheel, y + 32, 13, (44, 44, 50))
        _disc(draw, wheel, y + 32, 6, KERBSTONE)


def _cyclist(draw: ImageDraw.ImageDraw, x: int, y: int) -> None:
    draw.ellipse((x - 24, y + 12, x + 62, y + 22), fill=SHADOW)
    for wheel in (x, x + 40):
        draw.ellipse((wheel - 16, y - 16, wheel + 16, y + 16), outline=(36, 38, 44), width=3)
    draw.line([(x, y), (x + 12, y - 26), (x + 34, y - 26), (x + 18, y), (x, y)], METAL, 2)
    draw.line([(x + 18, y), (x + 12, y - 26)], METAL, 2)
    draw.line([(x + 40, y), (x + 32, y - 34), (x + 40, y - 38)], METAL, 2)
    draw.line([(x + 12, y - 28), (x + 24, y - 12), (x + 18, y + 2)], (54, 62, 92), 6)
    draw.line([(x + 12, y - 30), (x + 20, y - 54)], (226, 164, 60), 11)
    draw.line([(x + 20, y - 52), (x + 36, y - 38)], (226, 164, 60), 5)
    _disc(draw, x + 24, y - 64, 8, SKIN)
    draw.pieslice((x + 14, y - 75, x + 33, y - 56), 170, 360, fill=(186, 62, 58))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("street.png")
    draw_street().save(target, optimize=True)
    print(f"{target}: {WIDTH} x {HEIGHT} pixels, {target.stat().st_size / 1024:.1f} KiB")
